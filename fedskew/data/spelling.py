"""One spelling for texts that look the same. Unicode has two forms of letters such as ä: one character, or two."""

from __future__ import annotations

import unicodedata


def composed(text: str) -> str:
    """Return the text in the composed form, NFC. Files from macOS often have the other form, NFD."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)
