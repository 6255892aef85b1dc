"""Lines of Python in each room beside its budget; fails where a room is larger than its ceiling."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = "src/specact"

# Room: (budget, ceiling, which rises only for a feature whose commit says why). A file counts in its innermost room.
ROOMS: dict[str, tuple[int, int]] = {
    f"{SRC}": (1_600, 2_239),
    f"{SRC}/bundle": (450, 796),
    f"{SRC}/gates": (1_000, 1_262),
    f"{SRC}/families": (2_900, 3_633),
    f"{SRC}/systems": (2_200, 3_173),
    f"{SRC}/execution": (500, 547),
    f"{SRC}/robot": (900, 1_216),
    f"{SRC}/wire": (450, 740),
    f"{SRC}/remote": (800, 800),
    f"{SRC}/server": (1_100, 1_454),
    f"{SRC}/links": (700, 700),
    f"{SRC}/contracts": (350, 445),
    f"{SRC}/cli": (2_000, 2_703),
    f"{SRC}/lab": (0, 187),
    f"{SRC}/lab/data": (2_500, 2_722),
    f"{SRC}/lab/envs": (2_700, 3_202),
    f"{SRC}/lab/train": (4_500, 5_596),
    f"{SRC}/lab/rollout": (2_100, 2_637),
    f"{SRC}/lab/evaluation": (1_700, 1_866),
    f"{SRC}/lab/tised": (1_700, 1_700),
    f"{SRC}/lab/report": (800, 1_166),
    "experiments": (4_500, 9_485),
    "benchmarks": (1_800, 1_800),
    "tests": (27_000, 34_208),
}
LAB = (f"{SRC}/lab", f"{SRC}/cli")


def room_of(file: Path) -> str | None:
    """The innermost room of a file."""
    path = file.relative_to(ROOT).as_posix()
    return max((room for room in ROOMS if path.startswith(f"{room}/")), key=len, default=None)


def main() -> int:
    """Prints the table; 1 if a ceiling is exceeded."""
    lines: dict[str, int] = dict.fromkeys(ROOMS, 0)
    files: dict[str, int] = dict.fromkeys(ROOMS, 0)
    for file in sorted(
        path for top in ("src", "experiments", "benchmarks", "tests") for path in (ROOT / top).rglob("*.py")
    ):
        room = room_of(file)
        if room is not None:
            lines[room] += file.read_bytes().count(b"\n")
            files[room] += 1
    print(f"{'room':30} {'lines':>7} {'files':>6} {'budget':>7} {'ceiling':>8}")
    too_large = []
    for room, (budget, ceiling) in ROOMS.items():
        excess = lines[room] > ceiling
        too_large += [room] * excess
        print(f"{room:30} {lines[room]:7} {files[room]:6} {budget:7} {ceiling:8}{'  TOO LARGE' * excess}")
    runtime = sum(count for room, count in lines.items() if room.startswith(SRC) and not room.startswith(LAB))
    lab = sum(count for room, count in lines.items() if room.startswith(f"{SRC}/lab"))
    source = sum(count for room, count in lines.items() if room.startswith(SRC))
    print(f"runtime {runtime} of 13000, lab {lab} of 16000, src {source} of 31000")
    for room in too_large:
        print(f"error: {room} has {lines[room]} lines, more than its ceiling of {ROOMS[room][1]}: simplify it")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
