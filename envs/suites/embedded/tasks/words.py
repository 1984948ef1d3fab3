"""The words on lettered screens."""

from __future__ import annotations

FIRST_NAMES = (
    "Ada", "Ben", "Clara", "David", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira",
    "Leo", "Mina", "Nils", "Olga", "Pablo", "Quinn", "Rosa", "Samir", "Tara", "Uma", "Viktor",
    "Wanda", "Yusuf", "Zoe",
)  # fmt: skip
LAST_NAMES = (
    "Adler", "Berg", "Costa", "Dahl", "Evans", "Fischer", "Garcia", "Haas", "Ito", "Jensen",
    "Kovac", "Lund", "Moreau", "Novak", "Okafor", "Pereira", "Quist", "Rossi", "Silva", "Tanaka",
)  # fmt: skip
CITIES = (
    "Aarhus", "Bergen", "Cadiz", "Dresden", "Evora", "Faro", "Ghent", "Haarlem", "Izmir", "Kyoto",
    "Lyon", "Malmo", "Nantes", "Oslo", "Porto", "Riga", "Split", "Turin", "Utrecht", "Vienna",
)  # fmt: skip
COUNTRIES = (
    "Austria", "Brazil", "Canada", "Denmark", "Egypt", "France", "Ghana", "Iceland", "Japan",
    "Kenya", "Norway", "Peru",
)  # fmt: skip
LANGUAGES = (
    "Arabic", "Danish", "Dutch", "English", "French", "German", "Hindi", "Italian", "Japanese",
    "Korean", "Spanish", "Turkish",
)  # fmt: skip
FOODS = (
    "Apples", "Bread", "Carrots", "Dates", "Eggs", "Figs", "Grapes", "Honey", "Kiwis", "Lemons",
    "Milk", "Nuts", "Olives", "Pears", "Rice", "Salt", "Tea",
)  # fmt: skip
COMPANIES = (
    "Acme",
    "Borealis",
    "Cobalt",
    "Delta",
    "Ember",
    "Fjord",
    "Granite",
    "Harbour",
    "Indigo",
)
STREETS = ("Elm Street", "Hill Road", "Lake Lane", "Mill Row", "Park Way", "Station Road")
CHORES = (
    "Book flights", "Buy stamps", "Call Ann", "Fix the bike", "Pay the rent", "Plan dinner",
    "Read chapter 4", "Send invoice", "Update notes", "Wash the car", "Water plants",
    "Write report",
)  # fmt: skip
FOLDERS = (
    "Archive", "Backup", "Budget", "Designs", "Drafts", "Invoices", "Letters", "Music", "Photos",
    "Projects", "Recipes", "Reports", "Scans", "Travel",
)  # fmt: skip
FILE_STEMS = (
    "agenda", "beach", "contract", "diary", "essay", "flyer", "garden", "houses", "ideas",
    "journey", "kitchen", "logo", "minutes", "notes", "outline", "plan", "quote", "receipt",
    "sketch", "ticket",
)  # fmt: skip
FILE_ENDINGS = (".txt", ".png", ".pdf", ".csv")
COMMANDS = (
    "Save", "Open", "Print", "Export", "Share", "Undo", "Redo", "Help", "Refresh", "Send", "Copy",
    "Archive", "Search", "Preview", "Reply", "Start", "Stop", "Connect",
)  # fmt: skip
