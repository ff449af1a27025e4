"""Both apps of a run: the server's ``fedgkd-pl fit``, and a node's clients, where their data is."""

import hashlib
import importlib.util
import json
import logging
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import fedgkd_pl
from fedgkd_pl.config.build import Experiment, build_command, build_request
from fedgkd_pl.config.request import Request, import_module_of_user, read_request
from fedgkd_pl.data.examples import digest
from fedgkd_pl.engines.base import InProcessSession
from fedgkd_pl.engines.flower.engine import FlowerEngine
from fedgkd_pl.engines.flower.records import (
    Contract,
    Mark,
    States,
    pack_answers,
    unpack_contract,
    unpack_task,
)
from fedgkd_pl.errors import ArgumentError, RunFailed, SettingError, require
from fedgkd_pl.federation.hardware import keep_memory
from fedgkd_pl.federation.message import Answer, ClientFailure, Message
from fedgkd_pl.federation.round import job_of
from fedgkd_pl.processes.command import quiet_libraries, run_command
from fedgkd_pl.runs.files import as_yaml
from fedgkd_pl.runs.folder import CONFIG
from fedgkd_pl.storage.files import write_text
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

log = logging.getLogger("fedgkd_pl")
TEMPLATE = Path(__file__).with_name("template")


def server_app(file: str) -> ServerApp:
    """The ServerApp: the server's Trainer, which reaches its clients through Flower."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        code = run_command(lambda: _fit(file, context.run_config, grid))
        if code:
            raise RunFailed(f"the run of {file} ended with code {code}")

    return app


def _fit(file: str, run_config: Mapping[str, Any], grid: Any) -> int:
    quiet_libraries()
    resume = str(run_config.get("resume", ""))
    experiment = build_request(request_of(file, run_config, ["--resume", resume] * bool(resume)))
    engine = experiment.model.engine
    if not isinstance(engine, FlowerEngine):
        raise SettingError("engine", "must be FlowerEngine", type(engine).__name__)
    engine.connect(grid, partial(contract_of, experiment))
    experiment.fit()
    return 0


def client_app(file: str, mods: list[Any] | None = None) -> ClientApp:
    """The ClientApp: the client half on the node's data; ``mods`` are Flower's modifiers."""
    app = ClientApp()

    @app.query()  # type: ignore[untyped-decorator]
    def meet(message: Any, context: Any) -> Any:
        clients: list[int] = []
        refuses = ""
        try:
            clients = node_of(file, context, unpack_contract(message.content))[1]
        except Exception as error:
            refuses = _outwards(error)
        card = ConfigRecord({"clients": clients, "refuses": refuses})
        return FlowerMessage(RecordDict({"node": card}), reply_to=message)

    @app.train(mods=mods)  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        task, since = unpack_task(message.content)
        try:
            asked = unpack_contract(message.content)
            node, clients = node_of(file, context, asked)
            folder = context.node_config.get("state-dir")
            # runs with other settings have states of their own; a resumed run has the same
            home = Path(str(folder)) / asked.settings[:16] if folder else None
            answers = node.train(task, since, clients, States(context.state, home))
        except Exception as error:
            reason = _outwards(error)
            answers = [ClientFailure(client, reason) for client in since]
        return FlowerMessage(pack_answers(answers), reply_to=message)

    return app


def request_of(file: str, run_config: Mapping[str, Any], more: Sequence[str] = ()) -> Request:
    """The ``fit`` that an app stands for.

    Args:
        run_config: Flower's: ``import`` names modules of the user's in the app's folder, ``args``
            holds flags that go behind the config.
        more: flags behind these.
    """
    folder = Path(file).parent
    names = str(run_config.get("import", "")).split()
    modules = [import_module_of_user(name, folder) for name in names]
    args = shlex.split(str(run_config.get("args", "")))
    return read_request("fit", ["--config", str(folder / CONFIG), *args, *more], modules)


def contract_of(experiment: Experiment, own_data: bool = False) -> Contract:
    """The contract of settings and loaded data; ``own_data``: the node's, not the server's."""
    text = json.dumps(experiment.fixed, sort_keys=True, default=str)
    public, split = experiment.data.public, experiment.model.split
    return Contract(
        version=fedgkd_pl.__version__,
        method=type(experiment.model).__name__,
        settings=hashlib.sha256(text.encode()).hexdigest(),
        data="" if own_data else experiment.data.fingerprint(),
        fixed=text,
        weights="" if split is None else split.digest_of_rest(experiment.model.global_state()),
        public="" if public is None else digest(public),
    )


class Node:
    """What a node's process holds: the data, a net, a Trainer.

    Args:
        request: the app's, followed by the node's own flags.
        owner: the client whose data all training data here is; None if the data is that of all.
    """

    def __init__(self, request: Request, owner: int | None) -> None:
        keep_memory()
        experiment = build_request(request)
        experiment.check(reaches_clients=False)
        model, data = experiment.model, experiment.data
        self.num_clients = data.num_clients
        model.lay_out(data, experiment.trainer.strategy.root_device)  # as the server's
        self.sends_models = model.shares_models
        job = job_of(model, experiment.trainer, data)
        engine = model.engine
        assert isinstance(engine, FlowerEngine)
        if owner is not None:
            source = data.public_source
            common = source is None or not source.from_training
            text = "every node would hold out its own: use OtherData, which is the same for all"
            require(common, "public", text)
            text = "must be 0: a node with data of its own trains on all of it"
            require(not any(data.client_fractions.values()), "client_test_fraction", text)
            text = "must be set: the most samples that a client with data of its own may have"
            require(engine.max_samples is not None, "max_samples", text)
            job.data = job.data.only(owner, data.everything)
        self.contract = contract_of(experiment, owner is not None)
        self.session = InProcessSession(job, engine.threads)

    def train(
        self, message: Message, since: Mapping[int, Mark], clients: list[int], kept: States
    ) -> list[Answer]:
        """What clients answer.

        Args:
            since: whom to train, and the mark of the state that each goes on from.
            clients: whom the node stands for.
            kept: the states of its clients.
        """
        answers: list[Answer] = []
        states = {}
        for client, mark in since.items():
            try:
                require(client in clients, "client", "this node stands for others", client)
                states[client] = kept.find(client, mark)
            except (SettingError, RunFailed) as error:
                answers.append(ClientFailure(client, str(error)))
        self.session.job.states = states
        for answer in self.session.run(message, list(states)):
            if isinstance(answer, ClientFailure):
                log.error("client %d: %s", answer.client, answer.traceback or answer.reason)
                name = answer.reason.split(":")[0]
                answer = ClientFailure(answer.client, f"{name} (its node's log says more)")
            else:
                if not self.sends_models:
                    answer.weights = {}  # they stay here
                mark = since[answer.client]
                answer.state = kept.add(answer.client, message.round, answer.state, mark)
            answers.append(answer)
        return answers


@lru_cache(maxsize=1)  # for processes that get several messages
def _node(argv: tuple[str, ...], modules: tuple[str, ...], owner: int | None) -> Node:
    return Node(Request("fit", list(argv), modules=modules), owner)


def node_of(file: str, context: Any, asked: Contract) -> tuple[Node, list[int]]:
    """The node of a context and its clients; refuses what its operator has not agreed to."""
    said = context.node_config
    agreed = {"version": fedgkd_pl.__version__, **said}
    for name in "version", "method", "settings":
        runs = getattr(asked, name)
        pinned = str(agreed.get(name, runs))
        text = f"this node takes part in {pinned} only, the server runs {runs}"
        require(pinned == runs, name, text)
    own = shlex.split(str(said.get("args", "")))
    no_checkpoint = ["--ckpt_path", "null"]  # which is the server's
    request = request_of(file, context.run_config, [*own, *no_checkpoint])
    try:
        node = _node(tuple(request.argv), request.modules, _owner(said))
    except ArgumentError as error:  # which may show what the operator has typed
        log.warning("this node's flags: %s", error)
        raise SettingError("args", "not understood by this node, whose log says why") from error
    breach = node.contract.breach(asked)
    require(not breach, "contract", f"this node would not do what the server wants: {breach}")
    return node, clients_of(said, node.num_clients)


def _owner(said: Mapping[str, Any]) -> int | None:
    """The client whose data a node has; None if the data is that of all."""
    own, client = said.get("own-data", False), said.get("client")
    alone = isinstance(client, int) and "clients" not in said
    fits = own is False or (own is True and alone)
    require(fits, "own-data", "must be true or false; it needs client=0, and no clients=", own)
    return client if own else None


def clients_of(said: Mapping[str, Any], num_clients: int) -> list[int]:
    """The clients that a node stands for.

    Args:
        said: the node's config: ``client=3``, ``clients="0 3 5"``, or ``partition-id=1
            num-partitions=2`` for every second client from 1 on.
        num_clients: how many there are in all.
    """
    try:
        if "client" in said or "clients" in said:
            given = f"{said.get('client', '')} {said.get('clients', '')}"
            clients = sorted({int(word) for word in given.replace(",", " ").split()})
        else:
            first, step = int(said["partition-id"]), int(said["num-partitions"])
            clients = list(range(first, num_clients, step))
    except (KeyError, ValueError) as error:
        text = 'this node has no client: set client=0 or clients="0 1"'
        raise SettingError("node-config", text) from error
    outside = [client for client in clients if not 0 <= client < num_clients]
    require(not outside, "client", f"must be 0 to {num_clients - 1}", outside)
    return clients


def _outwards(error: Exception) -> str:
    """What the server is told about an error: only our own texts, as others may show data."""
    if isinstance(error, SettingError | RunFailed):
        log.warning("this node refuses: %s", error)
        return str(error)
    log.error("this node fails", exc_info=error)
    return f"{type(error).__name__} (its node's log says more)"


def write_app(folder: str, argv: list[str]) -> None:
    """Writes an app to a new folder; ``argv`` are flags of ``fit``, checked as far as possible."""
    target = Path(folder)
    named = re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_-]{,31}", target.name)
    require(named is not None, "folder", "must have at most 32 letters, digits and dashes")
    require(not target.exists(), "folder", "exists already")
    resumes = any(word.startswith("--resume") for word in argv)
    require(not resumes, "resume", "goes to flwr run: --run-config 'resume=...'")
    own = (n for n, word in enumerate(argv) if word.startswith("--model.engine."))
    index = next(own, len(argv))  # before the engine's own flags
    words = [*argv[:index], "--model.engine", "FlowerEngine", *argv[index:]]
    experiment = build_command("fit", words)
    modules = sorted(experiment.modules)
    text = "must be FlowerEngine: its flags go behind all configs"
    require(isinstance(experiment.model.engine, FlowerEngine), "engine", text)
    names = {
        "name": target.name.replace("_", "-").lower(),
        "method": type(experiment.model).__name__,
        "data": type(experiment.data).__name__,
        "modules": " ".join(modules),
    }
    files = [_file(module) for module in modules]
    target.mkdir(parents=True)
    for file in files:
        shutil.copy(file, target)
    for file in TEMPLATE.iterdir():  # their names end in .tpl
        write_text(target / file.stem, file.read_text().format(**names))
    where = Path(experiment.settings["output_dir"]).absolute()  # flwr runs it elsewhere
    write_text(target / CONFIG, as_yaml(experiment.settings | {"output_dir": str(where)}))
    print(f"wrote {target}")
    print(f"simulate:  flwr run {target} --stream      for nodes: docs/flower.md")


def _file(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    text = "must be a module of one file, which the app takes along; install others"
    single = spec is not None and not spec.submodule_search_locations and "." not in module
    if spec is None or spec.origin is None or not single or module == "fedgkd_app":
        raise SettingError("import", text, module)
    return Path(spec.origin)
