"""Files and the imports between them, resolved by name alone."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

from repodocs.discover import Source
from repodocs.facts import Facts, Import


@dataclass(frozen=True)
class Place:
    """A file, or a symbol in it."""

    path: str
    symbol: str = ""


@dataclass(frozen=True)
class File:
    source: Source
    facts: Facts

    @property
    def path(self) -> str:
        return self.source.path

    @property
    def folder(self) -> str:
        return folder_of(self.path)

    @property
    def problems(self) -> list[str]:
        return [problem for problem in (self.source.problem, self.facts.problem) if problem]

    @property
    def is_test(self) -> bool:
        name = PurePosixPath(self.path).name
        return name.startswith("test_") or name.endswith("_test.py")


def folder_of(path: str) -> str:
    parent = PurePosixPath(path).parent.as_posix()
    return "" if parent == "." else parent


@dataclass
class Repository:
    """All files, by path. Everything else is derived from them."""

    name: str
    files: dict[str, File] = field(default_factory=dict)

    @cached_property
    def modules(self) -> dict[str, list[str]]:
        """Module name -> the files that have it; more than one where a name is used twice."""
        found: dict[str, list[str]] = {}
        for path, file in self.files.items():
            found.setdefault(file.source.module, []).append(path)
        return found

    @cached_property
    def _definitions(self) -> dict[str, set[str]]:
        return {path: {symbol.name for symbol in file.facts.symbols} for path, file in self.files.items()}

    @cached_property
    def _bindings(self) -> dict[str, dict[str, Import]]:
        return {path: {one.bound: one for one in file.facts.imports} for path, file in self.files.items()}

    @cached_property
    def imports(self) -> dict[str, list[str]]:
        """File -> the files that its import statements name, wherever they stand. Never itself."""
        found = {}
        for path, file in self.files.items():
            targets = {self.target(path, one) for one in file.facts.imports}
            found[path] = sorted(target for target in targets if target and target != path)
        return found

    @cached_property
    def importers(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {path: [] for path in self.files}
        for path, targets in self.imports.items():
            for target in targets:
                found[target].append(path)
        return found

    @cached_property
    def tests(self) -> dict[str, list[str]]:
        """File -> the test files that import it, or a name that it defines through any re-export."""
        found: dict[str, list[str]] = {path: [] for path in self.files}
        for path, file in self.files.items():
            if file.is_test:
                for target in sorted(self._reached(path) - {path}):
                    found[target].append(path)
        return found

    @cached_property
    def folders(self) -> dict[str, list[str]]:
        """Folder -> its own files; a folder that only has folders is there too, the root ("") always."""
        found: dict[str, list[str]] = {"": []}
        for path, file in self.files.items():
            found.setdefault(file.folder, []).append(path)
            for parent in PurePosixPath(path).parents:
                found.setdefault("" if parent.as_posix() == "." else parent.as_posix(), [])
        return dict(sorted(found.items()))

    def in_folder(self, folder: str) -> list[str]:
        return self.folders[folder]

    def outside(self, path: str) -> list[str]:
        """Top-level names that a file imports from elsewhere."""
        file = self.files[path]
        return sorted(
            {
                one.module.split(".")[0]
                for one in file.facts.imports
                if not one.level and not self.target(path, one)
            }
        )

    def target(self, path: str, one: Import) -> str:
        """The file that an import statement of `path` names; "" for one outside the repository."""
        module = self._absolute(path, one)
        submodule = self._file(f"{module}.{one.name}", path) if one.name else ""
        return submodule or self._file(module, path)

    def place_of(self, path: str, name: str) -> Place | None:
        """Where a name that is defined or bound in `path` has its definition, through any chain of re-exports."""
        return self._place_of(path, name, set())

    def _place_of(self, path: str, name: str, seen: set[tuple[str, str]]) -> Place | None:
        if (path, name) in seen:
            return None  # a cycle of re-exports
        seen.add((path, name))
        if name in self._definitions[path]:
            return Place(path, name)
        one = self._bindings[path].get(name)
        if one is None:
            return self._submodule(path, name)
        module = self._absolute(path, one)
        if not one.name:
            file = self._file(one.module if one.bound != one.module.split(".")[0] else one.bound, path)
            return Place(file) if file else None
        file = self._file(module, path)
        found = self._place_of(file, one.name, seen) if file else None
        if found is None:
            target = self.target(path, one)
            found = Place(target) if target else None
        return found

    def _submodule(self, path: str, name: str) -> Place | None:
        if not path.endswith("__init__.py"):
            return None
        file = self._file(f"{self.files[path].source.module}.{name}", path)
        return Place(file) if file else None

    def _reached(self, path: str) -> set[str]:
        names = [one.bound for one in self.files[path].facts.imports]
        found = set(self.imports[path])
        for chain in [*names, *self.files[path].facts.chains]:
            place = self._follow(path, chain.split("."))
            if place:
                found.add(place.path)
        return found

    def _follow(self, path: str, parts: list[str]) -> Place | None:
        place = self.place_of(path, parts[0])
        for part in parts[1:]:
            if place is None or place.symbol:
                return place
            place = self.place_of(place.path, part) or place
        return place

    def _absolute(self, path: str, one: Import) -> str:
        if not one.level:
            return one.module
        package = self.files[path].source.module.split(".")
        drop = one.level - path.endswith("__init__.py")
        base = package[: len(package) - drop] if drop <= len(package) else []
        return ".".join([*base, one.module] if one.module else base)

    def _file(self, module: str, importer: str) -> str:
        """The file of a module name: of several, the one nearest to the importer."""
        paths = self.modules.get(module, [])
        if len(paths) < 2:
            return paths[0] if paths else ""
        return max(paths, key=lambda path: (_shared(path, importer), path))


def _shared(a: str, b: str) -> int:
    """How many leading folders two paths have in common."""
    count = 0
    for left, right in zip(a.split("/")[:-1], b.split("/")[:-1], strict=False):
        if left != right:
            break
        count += 1
    return count
