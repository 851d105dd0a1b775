"""State files and state dicts that are damaged or hostile, and paths that cannot be written."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import random
import stat
import threading

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import package
from tests.test_checkpoint_file import Model as Several
from tests.test_checkpoint_file import assert_equal, build, train, trained


def one(name="weight", steps=1):
    """An optimizer of one matrix and one vector."""
    weight, bias = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4))
    optimizer = package().Muon([{"params": [(name, weight)]},
                                {"params": [("bias", bias)], "use_muon": False}])
    for number in range(steps):
        weight.grad, bias.grad = (torch.full_like(p, 1.0 + number) for p in (weight, bias))
        optimizer.step()
    return optimizer


@pytest.fixture
def file(tmp_path):
    """(path, metadata, tensors) of a good file."""
    path = str(tmp_path / "state")
    package().export_state(one(), path)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    return path, metadata, {key: value.clone() for key, value in load_file(path).items()}


def refused(path, message):
    """`import_state` raises a short ValueError with the path, and changes nothing."""
    optimizer = one(steps=2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message) as caught:
        package().import_state(optimizer, path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 800
    assert_equal(optimizer.state_dict(), before)


# counts of steps ----------------------------------------------------------------------------------

WRONG = [-1.0, -2.5, 0.5, math.nan, math.inf, -math.inf, -1e30, -1]


@pytest.mark.parametrize("count", WRONG)
@pytest.mark.parametrize("form", ["0-D", "1-D", "number", "float64"])
def test_a_step_that_is_no_count_is_refused(count, form):
    optimizer = one()
    saved = optimizer.state_dict()
    step = {"0-D": torch.tensor(count), "1-D": torch.tensor([count]), "number": count,
            "float64": torch.tensor(count, dtype=torch.float64)}[form]
    saved["state"][1] = {**saved["state"][1], "step": step}
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="step of parameter bias is .* must be a whole number >= 0"):
        optimizer.load_state_dict(saved)
    assert_equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("count", WRONG[:6])
def test_nor_is_it_taken_from_a_file(count, file):
    path, metadata, tensors = file
    tensors["state.bias.step"] = torch.tensor(count)
    save_file(tensors, path, {key: value for key, value in metadata.items() if key != "digest"})
    optimizer = one()
    with pytest.raises(ValueError, match="step of parameter bias is .* must be a whole number >= 0"):
        package().import_state(optimizer, path)


@pytest.mark.parametrize("count", [0, 0.0, 7, 7.0, torch.tensor(2**30), 1e9])
def test_a_step_that_is_a_count_is_loaded(count):
    optimizer = one()
    saved = optimizer.state_dict()
    saved["state"][1] = {**saved["state"][1], "step": count}
    optimizer.load_state_dict(saved)
    bias = optimizer.param_groups[1]["params"][0]
    assert optimizer.state[bias]["step"] == count and optimizer.state[bias]["step"].dtype == torch.float32
    optimizer.step()
    assert bias.isfinite().all()


class HostReads(TorchDispatchMode):
    """Counts reads of single numbers, for each of which the host waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("use_muon", [True, False])
def test_loading_reads_numbers_of_many_parameters_at_once(use_muon, dtype, optimizer):
    """45,000 matrices made 45,000 waits for the device."""
    def reads(count):
        params = [nn.Parameter(torch.ones(4, 8)) for _ in range(count)]
        for p in params:
            p.grad = torch.ones_like(p)
        made = optimizer.Muon([{"params": params, "use_muon": use_muon}], state_dtype=dtype)
        made.step()
        saved = made.state_dict()
        with HostReads() as mode:
            made.load_state_dict(saved)
        return mode.count

    assert reads(2) == reads(20)


@pytest.mark.parametrize("wrong", ["shape", "count"])
def test_the_first_wrong_state_is_named_although_numbers_are_read_later(wrong, optimizer):
    params = [(name, nn.Parameter(torch.ones(4, 8))) for name in "abc"]
    for _, p in params:
        p.grad = torch.ones_like(p)
    made = optimizer.Muon([{"params": params, "use_muon": False}])
    made.step()
    saved = copy.deepcopy(made.state_dict())
    saved["state"][2]["exp_avg"] = torch.ones(3)
    saved["state"][1]["step"] = torch.tensor(0.5)
    if wrong == "shape":
        saved["state"][0]["exp_avg"] = torch.ones(3)
    with pytest.raises(ValueError, match={"shape": "exp_avg of parameter a", "count": "step of parameter b"}[wrong]):
        made.load_state_dict(saved)


@pytest.mark.parametrize("value", ["7", None, object(), 10**400])
def test_a_state_that_is_no_number_is_refused(value):
    optimizer = one()
    saved = optimizer.state_dict()
    saved["state"][1] = {**saved["state"][1], "step": value}
    with pytest.raises(ValueError, match="step of parameter bias .* must be a"):
        optimizer.load_state_dict(saved)


# headers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [17, 200, 900, 100_000])
@pytest.mark.parametrize("key", ["params", "groups", "tensors"])
def test_a_deep_header_is_refused(depth, key, file):
    path, metadata, tensors = file
    metadata[key] = "[" * depth + "]" * depth
    save_file(tensors, path, metadata)
    refused(path, "a header that cannot be read")


@pytest.mark.parametrize("depth", [20, 450, 990])
def test_a_deep_option_is_refused(depth, file):
    path, metadata, tensors = file
    groups = json.loads(metadata["groups"])
    groups[0]["options"]["ns_coefficients"] = "deep"
    metadata["groups"] = json.dumps(groups).replace('"deep"', "[" * depth + "]" * depth)
    save_file(tensors, path, metadata)
    refused(path, "a header that cannot be read: (it is )?nested")


@pytest.mark.parametrize("key", ["params", "param_names", "use_muon"])
def test_what_is_no_option_is_not_taken_for_one(key, file):
    path, metadata, tensors = file
    groups = json.loads(metadata["groups"])
    groups[0]["options"][key] = [1]
    save_file(tensors, path, {**metadata, "groups": json.dumps(groups)})
    refused(path, f"a header that cannot be read: '{key}' is among the options of a group")


LONG = "f" * 100_000


def lengthen(key):
    def change(metadata, tensors):
        metadata[key] = LONG
    return change


def long_kind(metadata, tensors):
    groups = json.loads(metadata["groups"])
    groups[0]["use_muon"] = LONG
    metadata["groups"] = json.dumps(groups)


def set_option(key, value):
    def change(metadata, tensors):
        groups = json.loads(metadata["groups"])
        groups[0]["options"][key] = value
        metadata["groups"] = json.dumps(groups)
    return change


def long_parameter(metadata, tensors):
    params = json.loads(metadata["params"])
    metadata["params"] = json.dumps(params | {LONG: [1]})


def long_shape(metadata, tensors):
    params = json.loads(metadata["params"])
    metadata["params"] = json.dumps(params | {"weight": [1] * 50_000})


def long_tensor(metadata, tensors):
    tensors[LONG] = torch.ones(1)


@pytest.mark.parametrize("change", [
    lengthen("format"), lengthen("version"), lengthen("groups"), set_option("lr", LONG), long_kind,
    set_option("adjust_lr_fn", LONG), set_option("ns_coefficients", LONG),
    set_option("ns_coefficients", [[LONG, 1, 1]] * 5), set_option("ns_coefficients", [1.0] * 50_000),
    set_option("eps", [1] * 50_000), long_parameter, long_shape, long_tensor],
    ids=["format", "version", "groups", "lr", "use_muon", "scale", "set", "triple", "numbers", "eps",
         "parameter", "shape", "tensor"])
def test_messages_are_short(change, file):
    path, metadata, tensors = file
    change(metadata, tensors)
    save_file(tensors, path, metadata)
    optimizer = one()
    with pytest.raises(ValueError) as caught:
        package().import_state(optimizer, path)
    assert len(str(caught.value)) < 700


# bits ---------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_refused(tmp_path):
    """Anywhere in the tensors; of any dtype and shape that state has."""
    path, (_, optimizer) = tmp_path / "state", trained(1, torch.bfloat16, state_dtype=torch.bfloat16)
    package().export_state(optimizer, path)
    data = path.read_bytes()
    start, places = 8 + int.from_bytes(data[:8], "little"), random.Random(0)
    for _ in range(100):
        damaged = bytearray(data)
        damaged[places.randrange(start, len(data))] ^= 1 << places.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="state (is damaged: its tensors are not those)|step of"):
            package().import_state(optimizer, path)
    path.write_bytes(data)
    package().import_state(optimizer, path)


def test_tensors_that_changed_places_are_refused(tmp_path):
    model, optimizer = trained(1)
    path = tmp_path / "state"
    package().export_state(optimizer, path)
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    first, second = "state.embed.exp_avg", "state.embed.exp_avg_sq"
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match="is damaged: its tensors are not those that export_state wrote"):
        package().import_state(optimizer, path)


def test_files_without_a_digest_are_loaded(file):
    """Those of versions that wrote none."""
    path, metadata, tensors = file
    assert metadata.pop("digest").startswith("sha256:")
    save_file(tensors, path, metadata)
    optimizer, heir = one(), one(steps=0)
    package().import_state(heir, path)
    assert_equal(heir.state_dict(), optimizer.state_dict())


# writing ------------------------------------------------------------------------------------------


def test_threads_export_to_one_path(tmp_path):
    path, errors = str(tmp_path / "state"), []
    optimizers = [one(steps=number) for number in range(1, 5)]

    def export(optimizer):
        for _ in range(15):
            try:
                package().export_state(optimizer, path)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=export, args=(optimizer,)) for optimizer in optimizers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and os.listdir(tmp_path) == ["state"]
    heir = one(steps=0)
    package().import_state(heir, path)
    assert any(heir.state_dict()["state"][1]["step"] == number for number in range(1, 5))


def test_containers_with_like_process_numbers_do_not_meet(tmp_path, monkeypatch):
    """The name of the file that is written first does not depend on the process alone."""
    names = []

    def keep(tensors, part, metadata):
        names.append(part)
        save_file(tensors, part, metadata)

    monkeypatch.setattr("safetensors.torch.save_file", keep)
    for _ in range(2):
        package().export_state(one(), tmp_path / "state")
    assert len(set(names)) == 2 and {os.path.dirname(name) for name in names} == {str(tmp_path)}


@pytest.fixture
def umask():
    old = os.umask(0o027)
    yield
    os.umask(old)


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def test_the_mode_is_that_of_other_files(umask, tmp_path):
    """A new file has what the umask leaves; an old one keeps its own, as with open(path, "wb")."""
    package().export_state(one(), tmp_path / "new")
    assert mode_of(tmp_path / "new") == 0o640
    for mode in (0o600, 0o664):
        (tmp_path / "old").write_bytes(b"old")
        os.chmod(tmp_path / "old", mode)
        package().export_state(one(), tmp_path / "old")
        assert mode_of(tmp_path / "old") == mode


def test_a_symbolic_link_stays_one(tmp_path):
    (tmp_path / "runs").mkdir()
    target, latest, first = tmp_path / "runs" / "step1", tmp_path / "latest", tmp_path / "first"
    target.write_bytes(b"old")
    latest.symlink_to(target)
    first.symlink_to(tmp_path / "runs" / "step0")  # which does not exist yet
    for link in (latest, first):
        package().export_state(one(), link)
        assert link.is_symlink()
        package().import_state(one(steps=0), link)
    assert sorted(os.listdir(tmp_path / "runs")) == ["step0", "step1"]


def test_paths_of_any_form(tmp_path):
    for path in (str(tmp_path / "text"), os.fsencode(tmp_path / "bytes"), tmp_path / "object",
                 tmp_path / ("n" * 250), tmp_path / "\u00e9"):
        package().export_state(one(), path)
        package().import_state(one(), path)
    assert len(os.listdir(tmp_path)) == 5


def test_a_path_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package().export_state(one(), "state")
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize(("name", "kind", "number"), [
    ("no/such/file", FileNotFoundError, errno.ENOENT), ("n" * 300, OSError, errno.ENAMETOOLONG),
    ("folder", IsADirectoryError, errno.EISDIR), ("pipe", OSError, errno.EINVAL),
    ("file/within", NotADirectoryError, errno.ENOTDIR)], ids=lambda x: str(x)[:20])
def test_what_cannot_be_written_is_named(name, kind, number, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"")
    path = f"{tmp_path}/{name}"
    with pytest.raises(kind) as caught:
        package().export_state(one(), path)
    assert caught.value.errno == number and caught.value.filename == path
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "pipe"]


@pytest.mark.parametrize("error", [
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "another name")], ids=["safetensors", "system"])
def test_a_full_disk_is_an_error_of_the_system(error, file, monkeypatch):
    path, data = file[0], open(file[0], "rb").read()

    def fail(tensors, part, metadata):
        with open(part, "wb") as half:
            half.write(data[:50])
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="No space left on device") as caught:
        package().export_state(one(), path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, path)
    assert open(path, "rb").read() == data and os.listdir(os.path.dirname(path)) == ["state"]


@pytest.mark.parametrize("path", ["a\0b", b"a\0b"])
@pytest.mark.parametrize("function", ["export_state", "import_state"])
def test_a_nul_is_refused(path, function):
    with pytest.raises(ValueError, match="the path 'a.x00b' holds a NUL character"):
        getattr(package(), function)(one(), path)


def test_the_new_file_is_on_the_disk_before_it_takes_the_old_ones_place(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append(("sync", stat.S_ISDIR(os.fstat(file).st_mode)))
                        or sync(file))
    monkeypatch.setattr(os, "replace", lambda *names: done.append(("replace",)) or replace(*names))
    package().export_state(one(), tmp_path / "state")
    assert done == [("sync", False), ("replace",), ("sync", True)]


# default devices ----------------------------------------------------------------------------------


def test_state_is_loaded_under_any_default_device(tmp_path):
    """`with torch.device("meta")` is how models are built without memory."""
    model, optimizer = trained(2)
    package().export_state(optimizer, tmp_path / "state")
    saved = optimizer.state_dict()
    saved["state"] = {number: {key: value.item() if key == "step" else value for key, value in state.items()}
                      for number, state in saved["state"].items()}
    for load in (lambda heir: heir.load_state_dict(saved),
                 lambda heir: package().import_state(heir, tmp_path / "state")):
        other = Several()
        heir = build(other)
        with torch.device("meta"):
            load(heir)
            assert heir.skipped.item() == 0 and heir.skipped.device.type == "cpu"
        assert_equal(heir.state_dict()["state"], optimizer.state_dict()["state"])


def test_and_created_and_stepped_there():
    runs = []
    for device in ("meta", "cpu"):
        model = Several()
        optimizer = build(model, nonfinite="skip")
        with torch.device(device):
            optimizer.init_state()
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            optimizer.step()
        train(model, optimizer, [3])
        runs.append((model.state_dict(), optimizer.state_dict()))
    assert_equal(*map(list, runs))
