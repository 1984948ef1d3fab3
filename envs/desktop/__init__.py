"""Real applications on a virtual display: LibreOffice, mousepad, pcmanfm, galculator, GIMP."""
