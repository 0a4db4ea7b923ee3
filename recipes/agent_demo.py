"""The environment of recipe agent_demo: a class whose public methods are the tools, as in TRL."""

import random


class Vault:
    """A vault whose content the policy is to say: hint() says the code, and unlock() the content."""

    def reset(self, prompt: list[dict[str, str]], answer: str) -> None:
        """Begin an episode; `answer` is a column of the data."""
        self.content, self.code = answer, random.randrange(10, 100)

    def hint(self) -> int:
        """The code of the vault."""
        return self.code

    def unlock(self, code: int) -> str:
        """What is in the vault.

        Args:
            code: the code of the vault
        """
        if code != self.code:
            raise ValueError("wrong code")
        return self.content
