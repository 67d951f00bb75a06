"""Providers of the cluster. They create a cluster and load images into it; everything else is the same for all.

`local`: real nodes in network namespaces of this machine, by the scripts in the folder BALLAST_KUBE.
`kind`: a kind cluster, with docker. A cluster that runs already is used, and is left running. A new one has as many
nodes as BALLAST_E2E_NODES says, 1 by default.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from images import CPU_ONLY, IMAGES, Image, fingerprint, id_of_archive
from layers import add_layer
from programs import ROOT, run

MINUTES = 60.0
FETCH = ("curl", "--silent", "--fail", "--max-time", "5")
"""Every node has curl, also those of kind."""


class Provider(Protocol):
    """A provider of a cluster."""

    kubeconfig: Path

    def program(self, name: str) -> str:
        """Return the path of `kubectl`, `helm` or `prometheus`."""

    def is_up(self) -> bool:
        """Return whether a cluster runs already."""

    def up(self) -> None:
        """Create a cluster."""

    def nodes(self) -> list[str]:
        """Return the names of the nodes. The first one carries the control plane."""

    def down(self) -> None:
        """Remove the cluster."""

    def build(self) -> dict[Image, str]:
        """Build and load every image. Return their ids, as the kubelet reports them."""

    def patch(self, image: Image, files: dict[str, str]) -> str:
        """Put files (by absolute path) over a built image, and keep its name. Return the new id."""

    def bring(self, context: Path, dockerfile: str, name: str) -> None:
        """Build an image from another folder, and load it."""

    def add(self, image: Image, *, everywhere: bool = False) -> str:
        """Build a large image that few files need, and load it into the last node, or into each. Return the last."""

    def offer_gpus(self, count: int, *nodes: str) -> None:
        """Set the number of `nvidia.com/gpu` that each of these nodes offers, by default each node."""

    def renew_volumes(self) -> None:
        """Make the volumes of deleted claims available again, if the cluster does not provision new volumes."""

    def kill(self, container_id: str) -> None:
        """Kill the first process of a container from its node, because SIGKILL from inside has no effect."""
        self._tasks("kill", "-s", "KILL", container_id)

    def freeze(self, container_id: str) -> None:
        """Stop every process in a container. Its connections stay open, but are not answered."""
        self._tasks("pause", container_id)

    def thaw(self, container_id: str) -> None:
        """Continue the stopped processes."""
        self._tasks("resume", container_id)

    def _tasks(self, *words: str) -> None:
        """Call `ctr tasks` on the node of the container, which is the last word."""
        for node in self.nodes():
            if words[-1] in self.ctr(node, "list", "-q", check=False).split():
                self.ctr(node, *words)
                return
        raise AssertionError(f"no node runs container {words[-1]}")

    def ctr(self, node: str, *words: str, check: bool = True) -> str:
        """Call `ctr tasks` on a node, and return its output."""

    def restart(self, component: str) -> None:
        """Restart `kubelet`, `apiserver` or `etcd`."""

    def stop_node(self, node: str) -> None:
        """Cut the power of a node, but not of the first one. Its disk stays."""

    def start_node(self, node: str) -> None:
        """Start a stopped node again."""

    def cut_off(self, node: str) -> None:
        """Drop everything between a node and all others, without an answer."""

    def heal(self, node: str) -> None:
        """Connect a node again that was cut off."""

    def fetch_on(self, node: str, url: str) -> str:
        """Fetch a page from a node, which also works while the node is cut off."""

    def install_addon(self, name: str) -> None:
        """Install the operator of another project."""

    def remove_addon(self, name: str) -> None:
        """Remove it."""


class Local(Provider):
    """The cluster of BALLAST_KUBE, whose containers run on this machine."""

    def __init__(self) -> None:
        self._kube = Path(os.environ.get("BALLAST_KUBE") or ROOT.parent / "shared" / "kube").resolve()
        if not (self._kube / "cluster").exists():
            raise RuntimeError(f"no {self._kube}/cluster: set BALLAST_KUBE to its folder, or PROVIDER=kind")
        self._folder = Path(os.environ.get("BALLAST_KUBE_DIR") or "/tmp/ballast-kube")
        self._images = Path(os.environ.get("BALLAST_E2E_IMAGES") or "/tmp/ballast-e2e")
        self.kubeconfig = self._folder / "kubeconfig.host"

    def program(self, name: str) -> str:
        return str(self._kube / "bin" / name)

    def is_up(self) -> bool:
        words = ("--kubeconfig", self.kubeconfig, "get", "--raw", "/readyz", "--request-timeout=10s")
        return self.kubeconfig.exists() and run(self.program("kubectl"), *words, check=False).returncode == 0

    def up(self) -> None:
        if self._folder.exists():  # left by a cluster whose processes are gone, as after a restart of the machine
            self.down()
        self.cluster("up", "--nodes", str(wanted_nodes()), seconds=5 * MINUTES)

    def down(self) -> None:
        self.cluster("down", seconds=2 * MINUTES)

    def nodes(self) -> list[str]:
        return (self._folder / "nodes").read_text().split()

    def build(self) -> dict[Image, str]:
        self._images.mkdir(parents=True, exist_ok=True)
        return {image: self._load(image, self._built(image)) for image in IMAGES}

    def patch(self, image: Image, files: dict[str, str]) -> str:
        tar = self._images / "patched.tar"
        try:
            add_layer(self._built(image), tar, files)
            return self._load(image, tar)
        finally:
            tar.unlink(missing_ok=True)

    def bring(self, context: Path, dockerfile: str, name: str) -> None:
        self._images.mkdir(parents=True, exist_ok=True)
        tar = self._images / f"{name.replace(':', '-')}.tar"  # the tag names a commit: the image never changes
        if not tar.exists():
            run(self._kube / "build-image", context, context / dockerfile, name, tar, *CPU_ONLY, seconds=15 * MINUTES)
        self.cluster("load", str(tar), seconds=5 * MINUTES)

    def add(self, image: Image, *, everywhere: bool = False) -> str:
        self._images.mkdir(parents=True, exist_ok=True)
        node = self.nodes()[-1]
        self._load(image, self._built(image), "" if everywhere else node)
        return node

    def offer_gpus(self, count: int, *nodes: str) -> None:
        self.cluster("gpus", str(count), *nodes)

    def renew_volumes(self) -> None:
        self.cluster("volumes")

    def restart(self, component: str) -> None:
        # The script starts a component when the old process may still have its port.
        self.cluster("kill-component", component)
        self.cluster("restart", component)

    def stop_node(self, node: str) -> None:
        self.cluster("stop-node", node)

    def start_node(self, node: str) -> None:
        self.cluster("start-node", node, seconds=2 * MINUTES)

    def cut_off(self, node: str) -> None:
        self.cluster("partition", node)

    def heal(self, node: str) -> None:
        self.cluster("heal", node)

    def fetch_on(self, node: str, url: str) -> str:
        return self.cluster("exec", "--node", node, *FETCH, url)

    def install_addon(self, name: str) -> None:
        run(self._kube / "addon", "install", name, seconds=5 * MINUTES)

    def remove_addon(self, name: str) -> None:
        run(self._kube / "addon", "remove", name, seconds=3 * MINUTES)

    def ctr(self, node: str, *words: str, check: bool = True) -> str:
        return run("ctr", "-a", self._socket(node), "-n", "k8s.io", "tasks", *words, check=check).stdout

    def _socket(self, node: str) -> Path:
        """Return the socket of containerd on a node."""
        folder = Path("/run") / os.environ.get("BALLAST_KUBE_NAME", "ballast-kube")
        return (folder if node == self.nodes()[0] else folder / node) / "containerd.sock"

    def cluster(self, *arguments: str, seconds: float = 60) -> str:
        """Run the script of the cluster, which can also make components fail."""
        return run(self._kube / "cluster", *arguments, seconds=seconds).stdout

    def _built(self, image: Image) -> Path:
        """Return the image as an archive. Build it unless the archive of the last run has the same fingerprint."""
        stem = image.name.replace("/", "-").replace(":", "-")
        tar, made_from = self._images / f"{stem}.tar", self._images / f"{stem}.from"
        wanted = fingerprint(image)
        is_current = made_from.exists() and (made_from.read_text() == wanted or "BALLAST_E2E_REUSE" in os.environ)
        if not (tar.exists() and is_current):
            if image.program:
                self._pack(image, tar)
            else:
                if image.base is not None:
                    base = self._built(image.base)
                    if image.base not in IMAGES:
                        base.unlink()  # buildah keeps the image, and no node needs it
                run(self._kube / "build-image", ".", image.dockerfile, image.name, tar, *image.arguments,
                    seconds=30 * MINUTES)  # fmt: skip
            made_from.write_text(wanted)
        print(f"image {image.name}: {tar.stat().st_size / 1e6:.0f} MB, {id_of_archive(tar)}")
        return tar

    def _pack(self, image: Image, tar: Path) -> None:
        """Return an image of one program, which unpacks itself when it first runs."""
        cache = tar.with_suffix(".cache")
        run(self.program(image.program), "--version", env={"BALLAST_KUBE_CACHE": str(cache)})
        (program,) = cache.glob(f"*/{image.program}")
        entry = f"/bin/{image.program}"
        run(self._kube / "make-image", "--name", image.name, "--entrypoint", entry, "--user", "65534",
            "--file", f"{program}={entry}", tar)  # fmt: skip

    def _load(self, image: Image, tar: Path, node: str = "") -> str:
        """Load an archive into a node, by default into each node, unless it is there. Return the id of the image."""
        found = id_of_archive(tar)
        loaded = self._folder / f"loaded-{image.name.replace('/', '-')}"
        if not (loaded.exists() and loaded.read_text() == found):
            if node:
                run("ctr", "-a", self._socket(node), "-n", "k8s.io", "images", "import", tar, seconds=10 * MINUTES)
            else:
                self.cluster("load", str(tar), seconds=5 * MINUTES)
            loaded.write_text(found)
        return found


class Kind(Provider):
    """A kind cluster, whose nodes are docker containers."""

    NAME = "ballast-e2e"
    NODE = "ballast-e2e-control-plane"

    def __init__(self) -> None:
        for name in ("docker", "kind", "kubectl", "helm"):
            self.program(name)
        self.kubeconfig = Path(os.environ.get("BALLAST_E2E_KUBECONFIG") or "/tmp/ballast-e2e-kind.yaml")

    def program(self, name: str) -> str:
        found = shutil.which(name)
        if found is None:
            raise RuntimeError(
                f"PROVIDER=kind needs {name} on the PATH: see https://kind.sigs.k8s.io for its installation"
            )
        return found

    def is_up(self) -> bool:
        return self.NAME in run("kind", "get", "clusters").stdout.split()

    def up(self) -> None:
        config = ROOT / "e2e" / ("kind.yaml" if wanted_nodes() == 1 else "kind-3-nodes.yaml")
        run("kind", "create", "cluster", "--name", self.NAME, "--config", config, "--kubeconfig", self.kubeconfig,
            "--wait", "120s", seconds=10 * MINUTES)  # fmt: skip

    def down(self) -> None:
        run("kind", "delete", "cluster", "--name", self.NAME, seconds=3 * MINUTES)

    def build(self) -> dict[Image, str]:
        ids = {}
        for image in IMAGES:
            if image.is_pulled_elsewhere:
                continue
            self._build(image)
            ids[image] = self._load(image)
        self.offer_gpus(8)
        return ids

    def add(self, image: Image, *, everywhere: bool = False) -> str:
        if image.base is not None:
            self._build(image.base)
        self._build(image)
        node = self.nodes()[-1]
        self._load(image, *(() if everywhere else ("--nodes", node)))
        return node

    def _build(self, image: Image) -> None:
        run("docker", "build", "-f", image.dockerfile, "-t", image.name, *image.arguments,
            "--build-arg", "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu", ".",
            seconds=30 * MINUTES)  # fmt: skip

    def patch(self, image: Image, files: dict[str, str]) -> str:
        with TemporaryDirectory() as name:
            folder = Path(name)
            for path, text in files.items():
                (folder / Path(path).name).write_text(text)
            copies = "\n".join(f"COPY {Path(path).name} {path}" for path in files)
            (folder / "Dockerfile").write_text(f"FROM {image.name}\n{copies}\n")
            run("docker", "build", "-t", image.name, folder, seconds=5 * MINUTES)
        return self._load(image)

    def bring(self, context: Path, dockerfile: str, name: str) -> None:
        run("docker", "build", "-f", context / dockerfile, "-t", name, *CPU_ONLY,
            "--build-arg", "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu", context,
            seconds=30 * MINUTES)  # fmt: skip
        run("kind", "load", "docker-image", "--name", self.NAME, name, seconds=10 * MINUTES)

    def offer_gpus(self, count: int, *nodes: str) -> None:
        path = "/status/{}/nvidia.com~1gpu"
        patch = [{"op": "add", "path": path.format(part), "value": str(count)} for part in ("capacity", "allocatable")]
        for node in nodes or self.nodes():
            run("kubectl", "--kubeconfig", self.kubeconfig, "patch", "node", node, "--subresource=status",
                "--type=json", "-p", str(patch).replace("'", '"'))  # fmt: skip

    def renew_volumes(self) -> None:
        pass  # kind provisions them on demand

    def restart(self, component: str) -> None:
        if component == "kubelet":
            self._node("systemctl", "restart", "kubelet")
            return
        name = {"apiserver": "kube-apiserver"}.get(component, component)
        found = self._node("crictl", "ps", "-q", "--name", name).split()
        self._node("crictl", "stop", "--timeout", "0", *found)  # the kubelet starts it again

    def stop_node(self, node: str) -> None:
        run("docker", "kill", node)

    def start_node(self, node: str) -> None:
        run("docker", "start", node)
        run("kubectl", "--kubeconfig", self.kubeconfig, "wait", f"node/{node}", "--for=condition=Ready",
            "--timeout=120s", seconds=130)  # fmt: skip

    def cut_off(self, node: str) -> None:
        self._drop_all("-I", node)

    def heal(self, node: str) -> None:
        self._drop_all("-D", node)

    def fetch_on(self, node: str, url: str) -> str:
        return self._node(*FETCH, url, node=node)

    def install_addon(self, name: str) -> None:
        raise RuntimeError(f"install {name} in the kind cluster first, as its documentation says")

    def remove_addon(self, name: str) -> None:
        """Leave it, because the tests did not install it."""

    def _drop_all(self, action: str, node: str) -> None:
        for chain, flag in (("INPUT", "-i"), ("OUTPUT", "-o"), ("FORWARD", "-i"), ("FORWARD", "-o")):
            self._node("iptables", action, chain, flag, "eth0", "-j", "DROP", node=node)

    def _load(self, image: Image, *options: str) -> str:
        run("kind", "load", "docker-image", "--name", self.NAME, *options, image.name, seconds=10 * MINUTES)
        said = run("docker", "image", "inspect", "-f", "{{.Id}} {{.Size}}", image.name).stdout.split()
        print(f"image {image.name}: {int(said[1]) / 1e6:.0f} MB, {said[0]}")
        return said[0]

    def nodes(self) -> list[str]:
        found = run("kind", "get", "nodes", "--name", self.NAME).stdout.split()
        return sorted(found, key=lambda node: (node != self.NODE, node))

    def ctr(self, node: str, *words: str, check: bool = True) -> str:
        return self._node("ctr", "-n", "k8s.io", "tasks", *words, node=node, check=check)

    def _node(self, *words: str, node: str = NODE, check: bool = True) -> str:
        return run("docker", "exec", node, *words, check=check).stdout


def wanted_nodes() -> int:
    """Return the number of nodes of a new cluster."""
    return int(os.environ.get("BALLAST_E2E_NODES") or 1)


def chosen() -> Provider:
    """Return the provider that PROVIDER names."""
    name = os.environ.get("PROVIDER") or "local"
    kinds: dict[str, type[Local | Kind]] = {"local": Local, "kind": Kind}
    if name not in kinds:
        raise RuntimeError(f"PROVIDER is {name!r}: there are {', '.join(kinds)}")
    return kinds[name]()
