"""The rules of docs/architecture.md that a program can check, by reading the source. Each exception is listed with its
reason in one of the tables below; the tables may only shrink."""

import ast
import gc
import ipaddress
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from batchmill.types.engine_traits import ENGINES

SOURCE = Path(__file__).parent.parent / "src" / "batchmill"
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600
PARAMETERS_MAX = 9

# A module may import from its own row and the rows above it.
ROWS = {
    1: (
        "types",
        "states",
        "errors",
        "faults",
        "imports",
        "optional",
        "checksums",
        "owned_files",
        "owner_term",
        "part_files",
        "run_next",
        "function_runtime",
    ),
    2: ("ports", "config", "wire", "object_store"),
    3: ("datasets", "models", "store", "children"),
    4: ("engines", "executors"),
    5: ("jobs",),
    6: ("services", "server"),
    7: ("dialects", "console", "control"),
    8: ("owner", "prepared", "connection", "serving", "cli", "inprocess", "__main__"),
}
ROW_OF = {name: row for row, names in ROWS.items() for name in names}
CLIENT_ROW_MAX = 2  # the SDK reads the shared words and wire forms, nothing else
CLIENT_USERS = {"cli", "connection", "control", "inprocess"}  # commands ask an owner, and a server, with the SDK

# Besides the rows: package -> what it never imports.
NEVER = {
    "datasets": {"models", "store"},
    "models": {"datasets", "store"},
    "store": {"datasets", "models"},
    "services": {"dialects"},
    "server": {"dialects"},
    "dialects": {"console", "store", "datasets", "engines"},
    "console": {"dialects", "store", "datasets", "engines"},
    "owner": {"connection", "serving", "cli", "__main__"},
    "prepared": {"owner", "connection", "serving", "cli", "__main__"},
    "serving": {"cli", "__main__"},
}
# The plug-ins of a package: they never import one another, and the jobs know none of them by name.
PLUGINS = {
    "engines": {"function", "llm", "provider_batch", "remote"},
    "executors": {"local", "ray"},
}
# The folders inside `jobs`: a module imports from its own folder and those before it. Others are above all.
JOB_FOLDERS = ("ledger", "results", "intake", "pools")
JOB_FOLDER_AT = {name: at for at, name in enumerate(JOB_FOLDERS)}

HEAVY = {
    "aiohttp",
    "alembic",
    "botocore",
    "duckdb",
    "huggingface_hub",
    "jinja2",
    "cloudpickle",
    "narwhals",
    "pandas",
    "polars",
    "numpy",
    "obstore",
    "psycopg",
    "pyarrow",
    "rich",
    "sqlalchemy",
    "ray",
    "vllm",
    "torch",
    "starlette",
    "uvicorn",
    "grpc",
}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec"}
SQL_CALLS = {"execute", "executemany", "executescript", "exec_driver_sql", "text"}

# "module.function" of the name tables: what may import inside a function, and why.
NAME_TABLES: dict[str, str] = {
    "batchmill.__getattr__": "the public names",
    "batchmill.cli.jobs.displays.display_for": "the displays, of which one needs rich",
    "batchmill.cli.main.get_command": "the commands",
    "batchmill.cli.session.app": "batchmill.connection, once a command is called",
    "batchmill.cli.jobs.pipes.load": "what reads standard input and writes to standard output, for commands with `-`",
    "batchmill.client.pairs.load_transport": "what carries requests to a server, which needs httpx2",
    "batchmill.connection.load_control_client": "the client of another process's control socket, which needs httpx2",
    "batchmill.control.listener.load_server": "what speaks HTTP, which needs uvicorn",
    "batchmill.dialects.load_dialects": "the dialects",
    "batchmill.connection.load_owner": "what owns a data directory, which needs SQLAlchemy",
    "batchmill.cli.local.load_preview": "the previews of orders, which need SQLAlchemy",
    "batchmill.engines.import_engine": "the engines",
    "batchmill.owner._make_executor": "the executors of a cluster",
    "batchmill.jobs.results.gathering.create_table": "the tables results can be written as, of which one needs pyarrow",
    "batchmill.children.child._find": "the jobs of a child process, which its parent names",
    "batchmill.children.child._main": "what serves them, once the child is bound to its parent",
    "batchmill.jobs.ledger.plan.ordering": "the two orders of a plan, of which one needs numpy",
    "batchmill.jobs.intake.estimate.counter_for": "what counts tokens, which needs the package tokenizers",
    "batchmill.wire.calls.load_form": "the forms of calls, of which one needs numpy",
    "batchmill.imports.import_large": "what is imported later, or by some commands only",
    "batchmill.optional.require": "what is heavy, or needs the package of an extra",
    "batchmill.function_runtime.loading._import_module": "the user's own function",
    "batchmill.function_runtime.process._async_calls": "what calls async functions, which needs asyncio",
    "batchmill.function_runtime.installed.installed": "what the environment of a function has installed",
}
# Modules that compare or look up a word which is the name of an engine too -> what the word means there.
ENGINE_NAMES = {
    "batchmill.client.connection": "http is the scheme of a URL",
    "batchmill.client.bundling": "http is the scheme of a URL",
    "batchmill.dialects.ml_commons.cluster": "connector is an index of OpenSearch",
    "batchmill.models.addresses": "http is the scheme of a URL",
    "batchmill.models.connectors.reading": "http is a protocol of connectors",
    "batchmill.models.isolation": "function is the host name in a namespace",
    "batchmill.models.registry": "routes is what the configuration calls a model that has some",
    "batchmill.types.models": "routes is a model that waits for one to be chosen (`needs_route`)",
    "batchmill.server.http": "http is a kind of ASGI scope",
    "batchmill.server.tracing": "http is a kind of ASGI scope",
    "batchmill.services.functions.function": "routes are the aliases of a function",
    "batchmill.services.remote.connectors": "http is the scheme of a URL",
    "batchmill.services.remote.models": "connector is a field of a remote model",
}
# What changes files besides `OwnedFiles`, which checks the owner's term. Making a folder replaces nothing.
FILE_CHANGES = {
    "PartFile", "copyfile", "copytree", "hardlink_to", "link_over", "remove_files", "rename", "rmdir", "rmtree",
    "symlink_to", "unlink", "write_bytes", "write_text",
}  # fmt: skip
OS_CHANGES = {"link", "remove", "removedirs", "rename", "replace", "rmdir", "symlink", "truncate", "unlink"}
# Packages that change folders which a successor of the owner shares, besides the modules that import `OwnedFiles`.
SHARING = {"control", "owner", "serving", "services.adapters", "services.files", "services.functions"}
# Modules of both that change files by themselves, too, and why no successor can have the same ones.
UNCHECKED_CHANGES = {
    "batchmill.jobs.ledger.scratch": "the folder of this process alone, whose lock it holds",
    "batchmill.services.files.incoming": "an arriving file gets the new id that it has got as its name",
    "batchmill.services.functions.sent_archives": "the archive of a command, which nobody has locked",
}
# Ratchets: what was too large when the rule came -> its size then.
LONG_FUNCTIONS: dict[str, int] = {}
# tools/make_revision.py writes it: a table takes as many lines as it has columns.
LONG_MODULES: dict[str, int] = {"batchmill.store.sql.revisions.version_4": 700}


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, and where the statement stands."""

    target: str
    line: int
    function: str  # the function around it, or "" at the module's own level
    for_types_only: bool = False


@dataclass(frozen=True)
class Module:
    """One file of the package, parsed."""

    name: str  # "batchmill.jobs.ledger.plan"
    path: Path
    tree: ast.Module
    nodes: list[tuple[ast.AST, str, bool]] = field(compare=False)  # what `walk` finds: every rule reads the same walk
    lines: int

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.name.split(".")[1:])


@cache
def read_modules() -> dict[str, Module]:
    """Every module, parsed and walked once. A collector would go over a million new nodes again and again."""
    gc.disable()
    try:
        return {module.name: module for module in map(read_module, sorted(SOURCE.rglob("*.py")))}
    finally:
        gc.freeze()
        gc.enable()


def read_module(path: Path) -> Module:
    parts = list(path.relative_to(SOURCE.parent).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    text = path.read_text()
    tree = ast.parse(text, str(path))
    nodes: list[tuple[ast.AST, str, bool]] = []
    walk(tree, nodes)
    return Module(".".join(parts), path, tree, nodes, text.count("\n"))


def is_types_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, found: list[tuple[ast.AST, str, bool]], function: str = "", for_types: bool = False) -> None:
    """Add every node below, the function it stands in, and whether only a type checker reads it."""
    for child in ast.iter_child_nodes(node):
        found.append((child, function, for_types))
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{function}.{child.name}" if function else child.name
        walk(child, found, inner, for_types or is_types_guard(child))


def imported_names(module: Module, node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules an import statement loads; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = module.name.split(".")
        above = len(package) - node.level + (module.path.name == "__init__.py")
        base = ".".join(package[:above] + ([base] if base else []))
    inner = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name in read_modules() else base for name in inner]


@cache
def imports(module: Module) -> list[Import]:
    found = []
    for node, function, for_types in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = imported_names(module, node)
            found += [Import(name, node.lineno, function, for_types) for name in dict.fromkeys(names)]
    return found


@cache
def own_imports(module: Module) -> list[tuple[Import, tuple[str, ...]]]:
    """Imports of other parts of batchmill, each with its path below the package; its bare root has none."""
    pairs = [(item, tuple(item.target.split("."))) for item in imports(module)]
    return [(item, parts[1:]) for item, parts in pairs if parts[0] == "batchmill"]


def functions(module: Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node, function, _ in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{module.name}.{f'{function}.' if function else ''}{node.name}", node


def calls(module: Module) -> Iterator[tuple[ast.Call, str, str]]:
    """Every call, the last part of the name that is called, and the function it stands in."""
    for node, function, _ in module.nodes:
        if isinstance(node, ast.Call):
            called = node.func
            yield node, called.id if isinstance(called, ast.Name) else getattr(called, "attr", ""), function


def row_problem(module: Module, parts: tuple[str, ...]) -> str | None:
    """Why `module` may not import `batchmill.<parts>`, or None."""
    if not module.parts or not parts:
        return None  # the package root: held to importing nothing heavy by the test of what an import loads
    here, there = module.parts[0], parts[0]
    if here == "client":
        return None if there == "client" or ROW_OF[there] <= CLIENT_ROW_MAX else "the client reads rows 1 and 2 only"
    if there == "client" and here in CLIENT_USERS:
        return None
    if there == "client" or ROW_OF[there] > ROW_OF[here]:
        return f"row {ROW_OF[here]} may not look down to it"
    return f"{here} never imports {there}" if there in NEVER.get(here, ()) else None


def plugin_problem(module: Module, parts: tuple[str, ...]) -> str | None:
    """Why `module` may not import the plug-in `batchmill.<parts>`, or None."""
    plugins = PLUGINS.get(parts[0], set()) if len(parts) > 1 else set()
    if not module.parts or len(parts) < 2 or parts[1] not in plugins:
        return None
    if module.parts[0] == "jobs":
        return "jobs get their engines and executors through ports"
    is_plugin = module.parts[0] == parts[0] and len(module.parts) > 1 and module.parts[1] in plugins
    return "plug-ins do not know their siblings" if is_plugin and module.parts[1] != parts[1] else None


def find_cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(edges[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1 or name in edges[name]:
                cycles.append(sorted(group))

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return cycles


def loaded_by(statement: str) -> set[str]:
    """The top-level names of every module that a fresh interpreter holds after `statement`."""
    code = f"import sys; {statement}; print(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_source_was_found():
    """The rules below look at the whole package, not at an empty folder."""
    assert {"batchmill", "batchmill.types", "batchmill.ports"} <= set(read_modules())


def test_every_module_has_a_row():
    """Every part of the package stands in the table of who may import whom."""
    tops = {module.parts[0] for module in read_modules().values() if module.parts}
    assert tops - set(ROW_OF) - {"client", "__main__"} == set()


def test_imports_go_up_the_table():
    """A module imports from its own row and the rows above, and nothing that its row forbids."""
    broken = [
        f"{module.name}:{item.line} imports {item.target}: {problem}"
        for module in read_modules().values()
        for item, parts in own_imports(module)
        if (problem := row_problem(module, parts) or plugin_problem(module, parts))
    ]
    assert broken == []


def test_folders_of_jobs_stand_above_each_other():
    """A module of `jobs` imports from its own folder and those before it."""
    found = {
        module.parts[1] for module in read_modules().values() if module.parts[:1] == ("jobs",) and module.parts[1:]
    }
    assert set(JOB_FOLDERS) <= found
    top = len(JOB_FOLDERS)
    broken = [
        f"{module.name}:{item.line} imports {item.target}"
        for module in read_modules().values()
        for item, parts in own_imports(module)
        if module.parts[:1] == parts[:1] == ("jobs",)
        and module.parts[1:]
        and parts[1:]
        and JOB_FOLDER_AT.get(parts[1], top) > JOB_FOLDER_AT.get(module.parts[1], top)
    ]
    assert broken == []


def test_imports_have_no_cycles():
    """No module needs, through others, itself to be loaded first."""
    edges: dict[str, set[str]] = {name: set() for name in read_modules()}
    for module in read_modules().values():
        targets = {item.target for item in imports(module) if not item.function and not item.for_types_only}
        edges[module.name] = (targets & set(edges)) - {module.name}
    assert find_cycles(edges) == []


def test_cycles_would_be_found():
    """The search for cycles sees a short one and a long one, and no others."""
    edges = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a"}}
    assert sorted(find_cycles(edges)) == [["a", "b"], ["c", "d", "e"]]


def test_functions_are_short():
    """No function is longer than 70 lines or takes more than nine parameters."""
    broken = []
    for module in read_modules().values():
        for name, node in functions(module):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            taken = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if lines > LONG_FUNCTIONS.get(name, FUNCTION_LINES_MAX) or len(taken) > PARAMETERS_MAX:
                broken.append(f"{name}: {lines} lines, {len(taken)} parameters")
    assert broken == []


def test_modules_are_short():
    """No module is longer than 600 lines."""
    modules = read_modules().values()
    assert [m.name for m in modules if m.lines > LONG_MODULES.get(m.name, MODULE_LINES_MAX)] == []


def test_modules_say_what_they_own():
    """Every module that holds code has a docstring."""
    assert [m.name for m in read_modules().values() if m.tree.body and not ast.get_docstring(m.tree)] == []


def test_imports_stand_at_the_top():
    """Only a name table imports inside a function, and the list of name tables holds no others."""
    lazy = set()
    for module in read_modules().values():
        lazy |= {f"{module.name}.{item.function}" for item in imports(module) if item.function}
        for _, name, function in calls(module):
            if name in {"import_module", "import_large", "__import__"} and function:
                lazy.add(f"{module.name}.{function}")
    assert lazy == set(NAME_TABLES)


def engine_names(node: ast.AST) -> list[str]:
    """Where a decision is made by the name of an engine: comparisons, patterns, sets, lists, keys of a table."""
    match node:
        case ast.Compare(left=left, comparators=others):
            sides = [left, *others]
            if sum(isinstance(side, ast.Attribute) and side.attr == "engine" for side in sides) == 1:
                return [ast.unparse(node)]
            found: list[ast.expr | None] = sides
        case ast.Set(elts=found) | ast.List(elts=found) | ast.Tuple(elts=found) | ast.Dict(keys=found):
            pass
        case ast.MatchValue(value=value):
            found = [value]
        case ast.Subscript(slice=ast.Attribute(attr="engine")):
            return [ast.unparse(node)]
        case _:
            return []
    return [each.value for each in found if isinstance(each, ast.Constant) and each.value in ENGINES]


def test_engines_are_known_by_their_traits():
    """No module outside the engines' folders decides by an engine's name; it reads a trait of the engine's row."""
    broken = {
        module.name: [name for node, _, _ in module.nodes for name in engine_names(node)]
        for module in read_modules().values()
        if module.parts[:1] != ("engines",) and module.name != "batchmill.types.engine_traits"
    }
    assert {name for name, found in broken.items() if found} == set(ENGINE_NAMES), broken


def test_nothing_runs_what_it_reads():
    """No pickle, no eval, no exec, no shell."""
    broken = []
    for module in read_modules().values():
        broken += [f"{module.name}:{i.line} {i.target}" for i in imports(module) if i.target in UNSAFE_MODULES]
        for call, name, _ in calls(module):
            is_bare = isinstance(call.func, ast.Name) and name in UNSAFE_CALLS
            is_shell = any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in call.keywords)
            is_command = name in {"system", "popen"} and ast.unparse(call.func) in {"os.system", "os.popen"}
            if is_bare or is_shell or is_command:
                broken.append(f"{module.name}:{call.lineno} {ast.unparse(call.func)}")
    assert broken == []


def test_addresses_are_judged_by_our_own_tables():
    """No property of ipaddress says what an address is: they differ from one Python to the next."""
    properties = {
        each for kind in (ipaddress.IPv4Address, ipaddress.IPv6Address) for each in dir(kind) if each.startswith("is_")
    }
    properties |= {"sixtofour", "teredo", "ipv4_mapped"}
    found = [
        f"{module.name}:{node.lineno} asks for .{node.attr}"
        for module in read_modules().values()
        for node, _, _ in module.nodes
        if isinstance(node, ast.Attribute) and node.attr in properties
    ]
    assert not found, found


def file_changes(module: Module) -> list[str]:
    """Where a module changes files without `OwnedFiles`, also where it only passes on the function that does."""
    found = []
    for node, _, _ in module.nodes:
        if isinstance(node, ast.Attribute):
            is_os = isinstance(node.value, ast.Name) and node.value.id == "os"
            is_change = node.attr in (OS_CHANGES if is_os else FILE_CHANGES)
        else:
            is_change = isinstance(node, ast.Name) and node.id in FILE_CHANGES
        if is_change:
            found.append(f"{module.name}:{getattr(node, 'lineno', 0)} {ast.unparse(node)}")
    return found


def test_shared_folders_are_changed_within_the_term():
    """Owners change folders that a successor shares through `OwnedFiles`, so that no check of the term is forgotten."""
    shared = [
        module
        for module in read_modules().values()
        if {".".join(module.parts[:length]) for length in (1, 2)} & SHARING
        or any(item.target == "batchmill.owned_files" for item in imports(module))
    ]
    assert len(shared) > len(SHARING)
    found = {module.name: found for module in shared if (found := file_changes(module))}
    assert set(found) == set(UNCHECKED_CHANGES), found


def test_sql_is_never_built_from_strings():
    """No statement is put together with an f-string, `%`, `+` or `format`: values are bound."""
    broken = []
    for module in read_modules().values():
        for call, name, _ in calls(module):
            first = call.args[0] if call.args else None
            is_built = isinstance(first, ast.JoinedStr | ast.BinOp) or (
                isinstance(first, ast.Call) and getattr(first.func, "attr", "") == "format"
            )
            if name in SQL_CALLS and is_built:
                broken.append(f"{module.name}:{call.lineno} {ast.unparse(call)}")
    assert broken == []


def test_import_loads_nothing_heavy():
    """`import batchmill` loads none of the heavy libraries."""
    assert loaded_by("import batchmill") & HEAVY == set()


def test_a_run_loads_what_it_needs():
    """`batchmill run`, its workers and its child processes load what only some jobs need when a job needs it."""
    run = "import batchmill.connection, batchmill.owner, batchmill.cli.jobs.run, batchmill.cli.jobs.displays"
    assert loaded_by(run) & {"numpy", "pyarrow", "rich", "starlette", "uvicorn", "httpx2", "grpc"} == set()
    child = loaded_by("import batchmill.children.child, batchmill.children.serving, batchmill.jobs.intake.preparation")
    assert child & {"asyncio", "numpy", "pyarrow", "sqlalchemy", "aiohttp", "click", "cryptography"} == set()
    worker = loaded_by("import batchmill.executors.worker, batchmill.engines.function.engine")
    assert worker & {"numpy", "sqlalchemy", "aiohttp", "click", "cryptography", "zstandard"} == set()


def test_a_command_beside_an_owner_loads_no_owner():
    """What an owner needs is loaded once a command has the lock, after the processes of its job have started."""
    command = loaded_by("import batchmill.cli.local, batchmill.cli.jobs.run, batchmill.cli.jobs.displays")
    assert command & (HEAVY | {"cryptography", "httpx2"}) == set()


def test_command_line_loads_nothing_heavy():
    """The command line, before it knows which command, loads none of the heavy libraries."""
    assert loaded_by("import batchmill.cli.main") & HEAVY == set()
