"""A verb whose command stands after ``--``: what would be taken for something else is refused with the cure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand

from oomproof.errors import UsageError


class Strict(TyperCommand):
    """Refuses an option that is given twice, and a command that does not stand after ``--``.

    The parser would take the last of two values, and give the command what was meant for the verb.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Look at the words before they are parsed. Raises UsageError."""
        if args and not ctx.resilient_parsing:
            given, _, order = self.make_parser(ctx).parse_args(args=list(args))
            if not given.get("help"):
                self._check(args, given, order)
        return super().parse_args(ctx, args)

    def _check(self, args: list[str], given: dict[str, Any], order: list[Any]) -> None:
        options = Counter(max(p.opts, key=len) for p in order if p.param_type_name == "option" and not p.is_flag)
        faults = [f"{name} is given {count} times; give it once" for name, count in options.items() if count > 1]
        arguments = [given.get(str(p.name)) for p in self.params if p.param_type_name == "argument"]
        words = [w for value in arguments for w in ([value] if isinstance(value, str) else value or ())]
        plan, command = words[: len(arguments) - 1], words[len(arguments) - 1 :]
        own = args[: len(args) - len(words)]
        apart = own[-1:] == ["--"]
        if plan:  # the parser leaves the dashes after an argument where they are
            apart = not apart and command[:1] == ["--"] and len(command) > 1
        if command and not apart:
            faults.append(
                f"write -- before the command, and options before that: oomproof {self.name} [OPTIONS]"
                f"{' PLAN' if plan else ''} -- python train.py"
            )
        if faults:
            raise UsageError("; ".join(faults))
