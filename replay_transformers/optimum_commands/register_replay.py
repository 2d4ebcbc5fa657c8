"""`optimum-cli replay ...`: the commands of `replay-transformers` in optimum's command line.

The wheel installs this file as `optimum/commands/register/register_replay.py`, where optimum looks for commands. It is
read at every start of optimum-cli, so that it imports nothing of this package before it runs.
"""

from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

__all__ = ["REGISTER_COMMANDS", "ReplayCommand"]


class ReplayCommand(BaseOptimumCLICommand):
    """Hands everything behind `optimum-cli replay` to the command line of this package."""

    COMMAND = CommandInfo(name="replay", help="Decode hybrid state-space models with a replay cache.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Take all arguments as they are."""
        parser.add_argument(
            "arguments", nargs=REMAINDER, metavar="COMMAND ...", help="check, demo or generate, each with --help"
        )

    def run(self) -> None:
        """Run the command; ends with its exit status."""
        from replay_transformers.cli.app import app

        assert self.args is not None
        app(args=self.args.arguments, prog_name="optimum-cli replay")


REGISTER_COMMANDS = [ReplayCommand]
