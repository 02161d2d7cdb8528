"""Hide secrets in everything that leaves the dashboard."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

#: A field is hidden if its name contains one of these, regardless of case, "-" and "_".
SECRETS: Final = (
    *("password", "passwd", "passphrase", "secret", "token", "apikey", "accesskey", "privatekey"),
    *("authorization", "credential", "cookie", "signature"),
)
#: The text in place of a secret.
HIDDEN: Final = "••••••"
#: The longest text that is shown, in characters.
MAX_TEXT: Final = 65_536
#: The maximum length of a user and a password in a URL, together.
_MAX_LOGIN: Final = 2000
#: A login in a URL. The end of a text of at least ``_CUT`` characters may have been cut off.
_LOGIN: Final = re.compile(rf"://[^\s/@]{{1,{_MAX_LOGIN}}}@")
_CUT_LOGIN: Final = re.compile(rf"://[^\s/@]{{1,{_MAX_LOGIN}}}\Z")
#: Texts of errors are stored up to this length, or up to a greater one.
_CUT: Final = 200

#: Given a path such as "payload.card.number" and a value, returns the value to show.
Redact = Callable[[str, Any], Any]


class Redactor:
    """Hides secrets: fields with certain names, and parts of texts that look like secrets.

    Args:
        names: Parts of names. A field whose name contains one of them is hidden.
        redact: Called with the path and the value of each other field; returns the value to show.
    """

    def __init__(self, names: Iterable[str], redact: Redact | None = None) -> None:
        self._names = tuple(_plain(each) for each in names if _plain(each))
        self._redact = redact
        # The rest of a name, a colon or an equals sign, and a value, which may be quoted. All
        # repetitions are bounded, or end at the first other character: texts may be hostile.
        loose = "|".join("[-_ ]?".join(map(re.escape, each)) for each in self._names) or "(?!)"
        self._in_text = re.compile(
            rf"""((?:{loose})[\w-]{{0,40}}\\?["']?\s{{0,3}}[:=]\s{{0,3}})"""
            r"""(?:(?:bearer|basic)\s{1,3})?(?:\\?"[^"]*"?|'[^']*'?|[^\s,;&}\])]+)""",
            re.IGNORECASE,
        )

    def hides(self, path: str) -> bool:
        """Return whether a path contains the name of a secret."""
        return any(part in _plain(name) for name in path.split(".") for part in self._names)

    def replaces(self, path: str) -> bool:
        """Return whether a document at this path, or one that contains the path, is not shown."""
        parts = path.split(".")
        parents = [".".join(parts[:end]) for end in range(1, len(parts))]
        return any(self.value(each, {}) != {} for each in parents)

    def value(self, path: str, value: Any) -> Any:
        """Return what to show for a value. Values inside lists and dicts are not examined."""
        if self.hides(path):
            return HIDDEN
        shown = value if self._redact is None else self._redact(path, value)
        return self._clean(shown) if isinstance(shown, str) else shown

    def text(self, path: str, text: str | None) -> str | None:
        """Return a text without its secrets. None stays None."""
        return None if text is None else str(self.value(path, text))

    def _clean(self, text: str) -> str:
        """Hide the parts of a text that look like secrets, and shorten a long text."""
        if len(text) > MAX_TEXT:
            text = text[:MAX_TEXT]
            # The end of a login in a URL may have been cut off.
            if (place := text.rfind("://", -_MAX_LOGIN - 3)) >= 0:
                text = text[:place]
        if len(text) >= _CUT:
            text = _CUT_LOGIN.sub(f"://{HIDDEN}", text)
        return _LOGIN.sub(f"://{HIDDEN}@", self._in_text.sub(rf"\g<1>{HIDDEN}", text))


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).casefold()
