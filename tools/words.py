"""Words in pages and comments at which readers stumble, with what to write instead.

    python tools/words.py

Prints `file:line: word: use ...`, and exits with 1 if there is any. Code is not searched.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("docs/**/*.md", "README.md", "CHANGELOG.md", "ampfast/**/*.py", "csrc/**/*.*")
USE = {
    "that one(?=[.,;:)])|theirs|those (of|that)": "the noun that is meant",
    "the (former|latter)|such an?": "the noun that is meant, this",
    "(there|where)(by|from|in|of|upon)|upon": "on, by, of and the noun that is meant",
    "for example, the first|as it were": "nothing, or a sentence before the table",
    "(t|w)?hence(forth)?|lest": "so, therefore, so that",
    "by (itself|themselves)": "itself, separately, automatically",
    "in (place|lieu) of|takes? the place of|st(ands?|ood) in": "instead of, replaces",
    "nothing but|but for": "only, except for",
    "goes on|went on|once more|anew|afresh": "continues, again",
    "all the same|none the less|likewise|moreover": "still, also",
    "(this|that|these) very|alike": "this, equal, in the same way",
    "meanwhile|of then": "at the same time, at that time",
    "told|noted": "said, known, recorded",
    "hand(ed|s)( out| over)?": "passes, returns",
    "either way": "in both directions, in each case",
    "rid(es?|ing)|rode": "is part of",
    "mend(ed|s|ing)?": "fixed",
    "aside|behind": "apart, after",
    "gone": "missing, destroyed",
    "perhaps": "may",
    "(forward|backward) pass(es)?": "forward, backward: a pass reads or writes all gradients",
    "overflow marks|marks of (tracking|overflows)": "overflow counters",
    "skips? limits? of steps|limit of the skips": "skip limit: a norm, limit of skips: a count",
    "(list|lists) of gradients": "gradient list",
    "what is not here": "what is missing, with its noun",
}
# Words that may stay in a file, such as the name of a function.
EXCEPTIONS = {
    "ampfast/diagnose/find_nonfinite.py": {"forward pass", "forward passes"},
}


def prose(path: Path) -> str:
    """Returns a page, or the comments and docstrings of a file, with spaces for code."""
    text, flags = path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    read = {".md": ".", ".py": r'^ *r?""".*?"""|#[^\n]*'}.get(path.suffix, r"//[^\n]*")
    text = re.sub(rf"({read})|[^\n]", lambda found: found[1] or " ", text, flags=flags)
    code = r"^```.*?^```|`[^`]*`|\]\([^)]*\)"
    return re.sub(code, lambda found: re.sub(r"\S", "_", found[0]), text, flags=flags)


def main(root: Path = ROOT) -> int:
    """Prints what is found; returns whether there is any."""
    found = []
    for path in sorted(path for each in FILES for path in root.glob(each)):
        name, text = path.relative_to(root).as_posix(), prose(path)
        for words, use in USE.items():
            # A phrase may go over the end of a line, with the next line's comment marker.
            pattern = rf"\b({words})\b".replace(" ", r"( +| *\n[ #/]*)")
            for match in re.finditer(pattern, text, re.IGNORECASE):
                word = " ".join(re.findall(r"\w+", match[0]))
                line = text.count("\n", 0, match.start()) + 1
                if word.lower() not in EXCEPTIONS.get(name, ()):
                    found.append((name, line, f"{word}: use {use}"))
    for finding in sorted(found):
        print(*finding, sep=":")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
