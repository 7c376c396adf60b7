"""Why no test notices some changes."""

EXPLAINED: dict[tuple[str, str, str, int], str] = {}
