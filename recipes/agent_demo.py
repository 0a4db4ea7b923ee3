"""The environment of recipe agent_demo: a class whose public methods are the tools, as in TRL."""


class Vault:
    """A vault that unlock() opens once find_key() was called."""

    def reset(self, prompt: list[dict[str, str]], **columns: str) -> None:
        """Begin an episode; the data has no column that is needed here."""
        self.has_key = self.is_open = False

    def find_key(self) -> str:
        """Look for the key."""
        self.has_key = True
        return "a key"

    def unlock(self) -> str:
        """Open the vault with the key."""
        if not self.has_key:
            raise ValueError("no key")
        self.is_open = True
        return "open"

    def score(self) -> float:
        """1 for an open vault."""
        return float(self.is_open)
