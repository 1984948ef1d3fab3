"""Text for screens: words that can be pronounced, names, numbers, dates, and what interfaces say.

    word, label      a tenth of all words, chosen by a hash, is drawn for tests alone (`held_out`)
    ui_word          OK, Cancel, Submit, ...: there is no held-out part of these
    name, number, date, email, password, sign
    value            what is typed in a field
    sentence         running text

With `held_out`, every pronounceable word is one of the tenth; without, none is.
"""

from __future__ import annotations

import zlib
from random import Random

VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
CLUSTERS = "th st sh ch tr br ck ng nt rd ll ss tt pl gr sp qu nd rt mb".split()
PAIRS = "ee oo ea ou ai io ie au".split()

UI_WORDS = """
OK Cancel Submit Search Next Back Previous Close Save Open Delete Edit Add Remove Send Reply Forward
Login Logout Help Home Menu File View Tools Settings Options Profile Account Yes No Apply Reset Clear
Copy Paste Cut Undo Redo Print Share Like More Less Show Hide Start Stop Play Pause Done Finish Buy
Cart Checkout Order Book Find Go Up Down Left Right First Last New Load Refresh Retry Accept Decline
Agree Confirm Continue Skip Update Upload Download Import Export Select Filter Sort All None Other
Inbox Sent Drafts Trash Archive Star Important Unread Mark Move Name Email Password Username Address
City Country Phone Date Time Price Total Size Colour Color Quantity Title Message Subject Comment
Status Type Category Description Language Theme Sign Register Subscribe Follow Block Report Mute
ok cancel submit search next back close save open delete edit add remove send reply login yes no
""".split()
"""What buttons, menus and labels of interfaces often say."""

FIRST_NAMES = """
Anna Ben Carla David Emma Felix Grace Hugo Ida Jack Karin Leo Mia Noah Olga Paul Quinn Rosa Sam Tina
Ulla Victor Wendy Xenia Yusuf Zoe Alice Bob Chloe Dora Erik Fiona George Helen Ivan Julia Kevin Laura
Martin Nina Oscar Petra Ralf Sarah Tom Ursula Vera Walter Yvonne Aaron Bella Cyrus Diana Elias Frida
""".split()
LAST_NAMES = """
Adams Baker Clark Dixon Evans Fisher Grant Hughes Irwin Jones King Lewis Moore Nolan Owens Parker
Quick Reed Smith Turner Underwood Vance Walker Xu Young Zimmer Novak Silva Rossi Meyer Kim Khan Diaz
""".split()

SIGNS = (
    "+ - * / = < > ? ! # % & @ $ ( ) [ ] { } | ~ ^ _ : ; , . << >> ... <- -> ++ -- == != && || (x) [x] "
    "(?) (!) +1 -1 x v"
).split()
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
DOMAINS = "com org net io de".split()


def is_held_out(text: str) -> bool:
    """Return True if a pronounceable word is for tests alone; its case does not matter."""
    return zlib.crc32(text.lower().encode()) % 10 == 0


def word(rng: Random, held_out: bool) -> str:
    """Return a lower-case word of 2 to 10 letters, mostly 3 to 7, that can be pronounced."""
    while True:
        text = _pronounceable(rng)
        if is_held_out(text) == held_out:
            return text


def cased(rng: Random, text: str) -> str:
    """Return the text as it is, Capitalised or UPPER, at random."""
    kind = rng.random()
    if kind < 0.45:
        return text
    return text.capitalize() if kind < 0.85 else text.upper()


def ui_word(rng: Random) -> str:
    """Return what interfaces say: a short English word."""
    return rng.choice(UI_WORDS)


def name(rng: Random, held_out: bool) -> str:
    """Return a first name, or a first and a last one; half of the last ones are made up."""
    first = rng.choice(FIRST_NAMES)
    if rng.random() < 0.5 and not held_out:
        return first
    last = word(rng, held_out).capitalize() if held_out or rng.random() < 0.5 else ""
    return f"{first} {last or rng.choice(LAST_NAMES)}"


def number(rng: Random) -> str:
    """Return a number as interfaces write it: plain, negative, with a fraction, a price, a share."""
    kind = rng.random()
    if kind < 0.5:
        return str(rng.randrange(10 ** rng.randint(1, 5)))
    if kind < 0.6:
        return str(-rng.randrange(1, 100))
    if kind < 0.75:
        return f"{rng.randrange(1000)}.{rng.randrange(100):02d}"
    if kind < 0.85:
        return f"${rng.randrange(500)}" + rng.choice(("", f".{rng.randrange(100):02d}"))
    if kind < 0.93:
        return f"{rng.randrange(101)}%"
    return f"#{rng.randrange(1, 100)}"


def date(rng: Random) -> str:
    """Return a date or a time of day in one of several forms."""
    year, month, day = rng.randint(1990, 2035), rng.randint(1, 12), rng.randint(1, 28)
    return rng.choice(
        (
            f"{month:02d}/{day:02d}/{year}",
            f"{day:02d}.{month:02d}.{year}",
            f"{year}-{month:02d}-{day:02d}",
            f"{day} {MONTHS[month - 1]} {year}",
            f"{MONTHS[month - 1]} {day}",
            f"{rng.randrange(24):02d}:{rng.randrange(60):02d}",
            f"{rng.randint(1, 12)}:{rng.randrange(60):02d} {rng.choice(('AM', 'PM'))}",
        )
    )


def email(rng: Random, held_out: bool) -> str:
    """Return what looks like an address of electronic mail, or a user's name with an @."""
    if rng.random() < 0.3:
        return f"@{word(rng, held_out)}"
    return f"{word(rng, held_out)}@{word(rng, held_out)[:6]}.{rng.choice(DOMAINS)}"


def password(rng: Random) -> str:
    """Return 2 to 8 random letters and digits."""
    return "".join(
        rng.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
        for _ in range(rng.randint(2, 8))
    )


def sign(rng: Random) -> str:
    """Return one sign, or two or three that belong together."""
    return rng.choice(SIGNS)


def label(rng: Random, held_out: bool) -> str:
    """Return what a thing on a screen is called: one to three words of any case, or a number."""
    kind = rng.random()
    if kind < 0.08:
        return number(rng)
    if kind < 0.14:
        return name(rng, held_out)
    if kind < 0.24 and not held_out:
        return ui_word(rng)
    first = cased(rng, word(rng, held_out))
    count = rng.choices((1, 2, 3), (70, 24, 6))[0]
    others = [word(rng, held_out) for _ in range(count - 1)]
    if first.isupper():
        others = [other.upper() for other in others]
    elif first[0].isupper() and rng.random() < 0.4:
        others = [other.capitalize() for other in others]
    if rng.random() < 0.04:
        others.append(str(rng.randint(1, 99)))
    return " ".join([first, *others])


def value(rng: Random, held_out: bool) -> str:
    """Return what is typed in a field: a word, a label, a name, a number, a date, an address, a password."""
    kind = rng.random()
    if kind < 0.4:
        return cased(rng, word(rng, held_out))
    if kind < 0.5:
        return label(rng, held_out)
    if kind < 0.65:
        return name(rng, held_out)
    if kind < 0.75:
        return number(rng)
    if kind < 0.83:
        return date(rng)
    if kind < 0.9:
        return email(rng, held_out)
    return password(rng)


def sentence(rng: Random, held_out: bool, most: int = 14) -> str:
    """Return running text of 3 to `most` words: a capital first, commas, a full stop."""
    tokens = [word(rng, held_out) for _ in range(rng.randint(3, max(3, most)))]
    tokens[0] = tokens[0].capitalize()
    for at in range(1, len(tokens) - 1):
        if rng.random() < 0.08:
            tokens[at] += rng.choice((",", ",", ";", ":"))
        elif rng.random() < 0.04:
            tokens[at] = number(rng)
    return " ".join(tokens) + rng.choices((".", "?", "!"), (8, 1, 1))[0]


def _pronounceable(rng: Random) -> str:
    """Return consonants and vowels in turn, now and then two of them at once."""
    parts = rng.randint(3, 7) if rng.random() < 0.92 else 2
    is_vowel = rng.random() < 0.4
    text = ""
    for _ in range(parts):
        doubled = rng.random() < 0.12
        if is_vowel:
            text += rng.choice(PAIRS) if doubled else rng.choice(VOWELS)
        else:
            text += rng.choice(CLUSTERS) if doubled else rng.choice(CONSONANTS)
        is_vowel = not is_vowel
    return text[:10]
