"""The processor packages' energy counters, where the system lets us read them."""

import threading
from pathlib import Path

import attrs

from telemetry.providers.base import SensorUnavailableError


@attrs.define
class _Package:
    counter: Path
    range_uj: int
    last_uj: int = -1
    total_uj: int = 0

    def read(self) -> int:
        """Microjoules since the first read: the counter itself starts over after some minutes."""
        now = int(self.counter.read_text())
        if self.last_uj >= 0:
            moved = now - self.last_uj
            # Below zero it has started over, once: it takes minutes and is read each second.
            self.total_uj += moved if moved >= 0 else moved + self.range_uj
        self.last_uj = now
        return self.total_uj


class Rapl:
    """Energy of all packages together, since it was made.

    Args:
        root: Where the system lists its power zones.
    """

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        self._root = root
        self._packages: list[_Package] | None = None
        # The sampler's thread and those that open windows read it.
        self._lock = threading.Lock()

    def read(self) -> tuple[int]:
        """Microjoules.

        Raises:
            SensorUnavailableError: There are no counters, or they may not be read.
        """
        try:
            with self._lock:
                if self._packages is None:
                    self._packages = self._find()
                return (sum(package.read() for package in self._packages),)
        except PermissionError as error:
            raise SensorUnavailableError(
                f"{error.filename} may be read by root only; other users need the right to read it"
            ) from error

    def _find(self) -> list[_Package]:
        # "intel-rapl:0" is a package (on AMD too), "intel-rapl:0:1" a part of it.
        zones = sorted(self._root.glob("intel-rapl:[0-9]*"))
        packages = [
            _Package(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()))
            for zone in zones
            if zone.name.count(":") == 1
        ]
        if not packages:
            raise SensorUnavailableError(
                f"no energy counter of the processor: {self._root} lists none (RAPL)"
            )
        return packages
