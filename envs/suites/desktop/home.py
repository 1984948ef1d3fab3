"""HOME of a fresh desktop: settings of the applications, so that every episode begins alike.

    write_home     writes the settings
    USER_FOLDERS   the folders in HOME
    office_folder  returns the folder of LibreOffice's programs

The settings turn off first-start dialogs, tips, blinking and animation, since anything that moves by itself
would keep a screen from settling, and the display of free disk space, which differs between hosts.
Application windows fill the screen, dialogs do not.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

USER_FOLDERS = ("Documents", "Downloads", "Music", "Pictures")

_GTK3 = """[Settings]
gtk-theme-name=Adwaita
gtk-font-name=DejaVu Sans 10
gtk-cursor-blink=false
gtk-enable-animations=false
gtk-recent-files-enabled=false
gtk-menu-images=false
gtk-dialogs-use-header=false
"""

_GTK2 = """gtk-font-name="DejaVu Sans 10"
gtk-cursor-blink=0
"""

_USER_DIRS = "".join(f'XDG_{name.upper()}_DIR="$HOME/{name}"\n' for name in USER_FOLDERS)

_OPENBOX = """<?xml version="1.0" encoding="UTF-8"?>
<openbox_config xmlns="http://openbox.org/3.4/rc">
<focus><focusNew>yes</focusNew><followMouse>no</followMouse></focus>
<placement><policy>Smart</policy><center>yes</center></placement>
<theme><name>Clearlooks</name><titleLayout>NLIMC</titleLayout><animateIconify>no</animateIconify>
<font place="ActiveWindow"><name>DejaVu Sans</name><size>9</size><weight>Bold</weight></font>
<font place="InactiveWindow"><name>DejaVu Sans</name><size>9</size><weight>Bold</weight></font>
</theme>
<desktops><number>1</number><popupTime>0</popupTime></desktops>
<resize><drawContents>yes</drawContents></resize>
<keyboard>
<keybind key="A-F4"><action name="Close"/></keybind>
<keybind key="A-Tab"><action name="NextWindow"><interactive>no</interactive><raise>yes</raise></action></keybind>
</keyboard>
<mouse><dragThreshold>4</dragThreshold><doubleClickTime>400</doubleClickTime>
<context name="Titlebar">
<mousebind button="Left" action="Press"><action name="Focus"/><action name="Raise"/></mousebind>
<mousebind button="Left" action="Drag"><action name="Move"/></mousebind>
<mousebind button="Left" action="DoubleClick"><action name="ToggleMaximize"/></mousebind>
</context>
<context name="Client">
<mousebind button="Left" action="Press"><action name="Focus"/><action name="Raise"/></mousebind>
<mousebind button="Middle" action="Press"><action name="Focus"/><action name="Raise"/></mousebind>
<mousebind button="Right" action="Press"><action name="Focus"/><action name="Raise"/></mousebind>
</context>
<context name="Close">
<mousebind button="Left" action="Click"><action name="Close"/></mousebind>
</context>
<context name="Maximize">
<mousebind button="Left" action="Click"><action name="ToggleMaximize"/></mousebind>
</context>
<context name="Top Bottom Left Right TLCorner TRCorner BLCorner BRCorner">
<mousebind button="Left" action="Drag"><action name="Resize"/></mousebind>
</context>
</mouse>
<applications>
<application class="*" type="normal"><focus>yes</focus></application>
<application name="mousepad" type="normal"><maximized>yes</maximized></application>
<application name="pcmanfm" type="normal"><maximized>yes</maximized></application>
<application name="libreoffice*" type="normal"><maximized>yes</maximized></application>
<application name="gimp*" type="normal"><maximized>yes</maximized></application>
</applications>
</openbox_config>
"""

_OFFICE = (
    ("Office.Common/Misc", "FirstRun", "false"),
    ("Office.Common/Misc", "ShowTipOfTheDay", "false"),
    ("Office.Common/Misc", "UseLocking", "false"),
    ("Office.Common/Misc", "PerformFileExtCheck", "false"),
    ("Office.Common/Save/Document", "WarnAlienFormat", "false"),
    ("Office.Common/Save/Document", "CreateBackup", "false"),
    ("Office.Recovery/AutoSave", "Enabled", "false"),
    ("Office.Recovery/RecoveryInfo", "Enabled", "false"),
    ("Office.Common/VCL", "AnimationsEnabled", "false"),
    ("Office.Common/AutoCorrect", "CapitalAtStartSentence", "false"),
    ("Office.Common/AutoCorrect", "TwoCapitalsAtStart", "false"),
    ("Office.Calc/Input", "LastFunctions", ""),
    ("Setup/Office", "ooSetupInstCompleted", "true"),
    ("Setup/Product", "ooSetupLastVersion", "100.0"),
    ("Setup/Product", "WhatsNew", "false"),
)
"""Group and name of a setting (org.openoffice.*), and its value."""

_PCMANFM = """[config]
bm_open_method=0
[volume]
mount_on_startup=0
mount_removable=0
autorun=0
[ui]
always_show_tabs=0
max_tab_chars=32
win_width=900
win_height=600
view_mode=list
show_hidden=0
show_statusbar=0
sort=name;ascending;
"""

_LIBFM = """[config]
single_click=0
use_trash=1
confirm_del=1
confirm_trash=0
[places]
places_home=1
places_desktop=0
places_trash=1
places_applications=0
places_root=0
places_computer=0
places_network=0
"""

_GIMP = """(check-updates no)
(save-document-history no)
(num-processors 1)
(undo-size 64M)
(tile-cache-size 256M)
"""

_GIMP_SESSION = """(session-info "toplevel"
    (factory-entry "gimp-single-image-window")
    (position 0 0)
    (size 1200 600)
    (open-on-exit)
    (aux-info (left-docks-width "188") (right-docks-width "205") (maximized "yes"))
    (gimp-toolbox (side left) (book (current-page 0) (dockable "gimp-tool-options")))
    (gimp-dock (side right) (book (current-page 0) (dockable "gimp-layer-list"))))
(hide-docks no)
(single-window-mode yes)
(last-tip-shown 0)
"""


def office_folder() -> Path:
    """Return the folder of LibreOffice's programs; the `soffice` on PATH is a script in it."""
    script = shutil.which("soffice")
    return Path(script).resolve().parent if script else Path("/usr/lib/libreoffice/program")


def write_home(home: Path) -> None:
    """Write the folders and settings of a fresh account into `home`."""
    for name in USER_FOLDERS:
        (home / name).mkdir()
    config = home / ".config"
    office = config / "libreoffice" / "4" / "user"
    for path, text in (
        (config / "gtk-3.0" / "settings.ini", _GTK3),
        (home / ".gtkrc-2.0", _GTK2),
        (config / "user-dirs.dirs", _USER_DIRS),
        (config / "openbox" / "rc.xml", _OPENBOX),
        (config / "pcmanfm" / "default" / "pcmanfm.conf", _PCMANFM),
        (config / "libfm" / "libfm.conf", _LIBFM),
        (config / "GIMP" / "2.10" / "gimprc", _GIMP),
        (config / "GIMP" / "2.10" / "sessionrc", _GIMP_SESSION),
        (office / "registrymodifications.xcu", _office()),
        # Without these files LibreOffice searches for extensions and restarts.
        (office / "extensions" / "buildid", _office_build()),
        (office / "extensions" / "bundled" / "lastsynchronized", "1"),
        (office / "extensions" / "shared" / "lastsynchronized", "1"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _office_build() -> str:
    """Return the build id of LibreOffice, "" if it is not installed."""
    with suppress(OSError):
        for line in (office_folder() / "versionrc").read_text(encoding="utf-8").splitlines():
            if line.startswith("buildid="):
                return line.removeprefix("buildid=")
    return ""


def _office() -> str:
    """Return the XML of LibreOffice's settings that differ from its defaults."""
    items = "".join(
        f'<item oor:path="/org.openoffice.{group}"><prop oor:name="{name}" oor:op="fuse">'
        f"<value>{value}</value></prop></item>\n"
        for group, name, value in _OFFICE
        if value
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<oor:items xmlns:oor="http://openoffice.org/2001/registry" '
        'xmlns:xs="http://www.w3.org/2001/XMLSchema" '
        'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">\n'
        f"{items}</oor:items>\n"
    )
