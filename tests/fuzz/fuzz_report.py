"""Runs a draw, and says how it failed: the program, then the error."""

import traceback


def failure_of(draw):
    """None where the draw passes."""
    try:
        draw.run()
    except Exception:
        return (
            f"draw {draw.seed} of {draw.name} failed. The program:\n\n{draw.program}\n{traceback.format_exc(limit=-4)}"
        )
    return None
