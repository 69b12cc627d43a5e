"""What a load did, in bytes and seconds."""

from dataclasses import dataclass


@dataclass(slots=True)
class LoadReport:
    """Filled in by `load_weights`.

    `wanted_bytes` are those of the files that the results are made of. Of the bytes read, `disk_bytes` were not in
    the page cache before, and `cached_bytes` were. `read_s`, `convert_s` and `deliver_s` are the times that threads
    spent on each, added up, `wall_s` what passed. `method` is how the disk was read at the end, "direct" or
    "buffered", or "cached" where all was in the page cache; `threads` on how many threads. `buffer_bytes` is the
    memory of the read buffers.
    """

    wanted_bytes: int = 0
    disk_bytes: int = 0
    cached_bytes: int = 0
    read_s: float = 0.0
    convert_s: float = 0.0
    deliver_s: float = 0.0
    wall_s: float = 0.0
    method: str = "cached"
    threads: int = 0
    buffer_bytes: int = 0
