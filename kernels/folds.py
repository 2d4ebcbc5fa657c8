"""How the kernels that fold due rows are launched.

Which rows are due is only known on the GPU. So a launch has programs enough to keep it busy, and they share the pieces
of the rows that are due, be they few or all.
"""

from dataclasses import dataclass

from replay_transformers.kernels.validation import power_of_two

__all__ = ["LIST", "FoldLaunch"]

LIST = 256  # rows whose pieces the same programs share


@dataclass(frozen=True)
class FoldLaunch:
    """Launch configuration of a fold.

    Args:
        block: channels of a tile.
        warps: of a program.
        stages: tiles that a program has under way.
        programs: at most so many.
        whole: a piece is a head, else a tile.
    """

    block: int
    warps: int
    stages: int
    programs: int
    whole: bool = False

    def tile(self, width: int, least: int = 1) -> int:
        """Channels of a tile, at least ``least``, where a head has ``width``."""
        return max(min(self.block, power_of_two(width)), least)

    def tiles(self, width: int, least: int = 1) -> int:
        """Tiles of a piece."""
        return -(-width // self.tile(width, least)) if self.whole else 1

    def grid(self, rows: int, heads: int, width: int, least: int = 1) -> tuple[int, int]:
        """Programs for each list of rows, and lists."""
        pieces = rows * heads * -(-width // (self.tile(width, least) * self.tiles(width, least)))
        lists = -(-rows // LIST)
        return -(-min(self.programs, pieces) // lists), lists
