"""Decisions in etcd, and the election of who decides: the loss of the node that a coordinator runs on is one more failure.

Of each job there are three keys. `leader` belongs to the coordinator that leads: it is made only where there is none, and vanishes with
the leader's lease, which a thread of its own keeps alive. `decided` is written in one transaction with the question whether `leader` is
still this one's own, so a coordinator that was cut off cannot record anything, and what is not recorded is not done. `coordinator` says
where agents reach the leader, and vanishes with it. `decided` outlives the job by a day, for coordinators that stood by and must hear
that it is over.

A leader counts its lease from before it asked for it, so it has stopped by the time etcd lets another one lead. Its clock may be off by
any amount, but not run at another rate.
"""

from __future__ import annotations

import base64
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from ..control.decided import Decided, decode, encode
from ..errors import Deposed, Malformed, UsageError
from .store import Store, require_schema

#: For how long a leader that says nothing is still the leader. An agent looks for a coordinator for minutes.
LEASE_S = 5
_RENEW_S = LEASE_S / 5
_KEPT_AFTER_S = 86_400
_ASK_S = 0.5
_TIMEOUT_S = 2.0
_ENDPOINT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):(\d{1,5})")


def endpoints(name: str) -> list[tuple[str, str, int]]:
    """(protocol, host, port) of etcd://HOST:PORT[,…].

    Raises:
        UsageError: it is not of that form.
    """
    scheme, _, rest = name.partition("://")
    found = [_ENDPOINT.fullmatch(one) for one in rest.rstrip("/").split(",")]
    if any(one is None or not 0 < int(one[2]) < 1 << 16 for one in found):
        raise UsageError(f"--hot-swap-store wants etcd://HOST:PORT[,HOST:PORT…], every port given (etcd's own is 2379), got {name!r}")
    protocol = "https" if scheme == "etcds" else "http"
    return [(protocol, one[1].strip("[]"), int(one[2])) for one in found if one is not None]


def _text(raw: str | bytes) -> str:
    return base64.b64encode(raw.encode() if isinstance(raw, str) else raw).decode()


def _root(failure: BaseException) -> str:
    """What lies under the layers of an HTTP library."""
    while (under := failure.__cause__ or failure.__context__) is not None:
        failure = under
    return getattr(failure, "detail_text", None) or str(failure) or repr(failure)


class EtcdStore(Store):
    """The keys of one job."""

    def __init__(self, name: str, run_id: str) -> None:
        try:
            import etcd3gw
            from etcd3gw.exceptions import Etcd3Exception
        except ImportError as missing:
            raise UsageError(
                f"--hot-swap-store {name} needs the package etcd3gw on every node: pip install etcd3gw, or leave the store at journal"
            ) from missing
        self._name, self._run_id, self._failed = name, run_id, Etcd3Exception
        self._clients = [
            etcd3gw.Etcd3Client(host, port, protocol, timeout=_TIMEOUT_S, api_path="/v3/") for protocol, host, port in endpoints(name)
        ]
        self._order = threading.Lock()  # of the clients
        self._me = uuid.uuid4().hex
        self._lease: int | None = None
        self._recorded = 0  # etcd's revision of the key `decided`, as far as this leader knows; 0: there is none
        self._until_s = 0.0  # this leader leads until then, by this process's clock
        self._over = threading.Event()

    def _key(self, name: str) -> str:
        return f"/deadpool/{self._run_id}/{name}"

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        """Of the first endpoint that answers, which is then asked first."""
        said = "no endpoint was asked"
        with self._order:
            clients = list(self._clients)
        for client in clients:
            try:
                answer = call(client)
            except (self._failed, OSError, KeyError, ValueError) as failure:
                said = f"{client.host}:{client.port}: {_root(failure)}"
                continue
            with self._order:
                self._clients.remove(client)
                self._clients.insert(0, client)
            return answer
        raise OSError(f"etcd ({self._name}) does not answer; {said}")

    # ---- to lead

    def lead(self) -> Decided | None:
        """As Store.lead; waits while another one leads, and while etcd does not answer, which is said once. `close` ends the wait."""
        said = ""
        while not self._over.is_set():
            try:
                if self._try_to_lead():
                    found = self._ask(lambda client: client.get(self._key("decided"), metadata=True))
                    threading.Thread(target=self._renew, name="deadpool-etcd-lease", daemon=True).start()
                    self._recorded = int(found[0][1]["mod_revision"]) if found else 0
                    return self._understood(found[0][0]) if found else None
            except OSError as away:
                self._revoke()
                if str(away) != said:
                    print(f"deadpool: {away}; it is asked again and again", file=sys.stderr, flush=True)
                said = str(away)
            self._over.wait(_ASK_S)
        return None

    def _understood(self, raw: bytes) -> Decided:
        try:
            decided: Decided = decode(raw)
        except Malformed as wrong:
            raise UsageError(f"what {self._name} has of this job cannot be taken up: {wrong}; start the job anew") from wrong
        require_schema(decided, self._name)
        return decided

    def _try_to_lead(self) -> bool:
        """Whether this one leads now."""
        if self._ask(lambda client: client.get(self._key("leader"))):
            return False
        asked_s = time.monotonic()
        self._lease = self._ask(lambda client: client.lease(LEASE_S)).id
        key = _text(self._key("leader"))
        put = {"request_put": {"key": key, "value": _text(self._me), "lease": self._lease}}
        none_leads = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}
        done = self._ask(lambda client: client.transaction({"compare": [none_leads], "success": [put], "failure": []}))
        if not done.get("succeeded"):
            self._revoke()
            return False
        self._until_s = asked_s + LEASE_S
        return True

    def _renew(self) -> None:
        while not self._over.wait(_RENEW_S) and not self.lost:  # who has lost it once stands for election again
            asked_s = time.monotonic()
            try:
                left = self._ask(lambda client: client.post(client.get_url("/lease/keepalive"), json={"ID": self._lease}))
            except OSError:
                continue
            if int(left.get("result", {}).get("TTL", 0)) <= 0:
                self._until_s = 0.0
                return
            self._until_s = asked_s + LEASE_S

    @property
    def lost(self) -> str:
        """As Store.lost."""
        return "" if time.monotonic() < self._until_s else f"it has not reached etcd ({self._name}) for its lease of {LEASE_S} s"

    def announce(self, address: str) -> None:
        """As Store.announce."""
        self._put("coordinator", address.encode(), self._lease)

    def save(self, decided: Decided) -> None:
        """As Store.save."""
        over = decided.exit_code is not None
        lease = self._ask(lambda client: client.lease(_KEPT_AFTER_S)).id if over else None
        while not self._put("decided", encode(decided), lease, self._recorded):
            pass  # one that was given up for lost has landed after all

    def _put(self, name: str, raw: bytes, lease: int | None, over: int | None = None) -> bool:
        """Whether it is there; with `over`, only in place of that revision, since what etcd did not answer may land later, and must not
        overwrite what was recorded since."""
        leader, key = _text(self._key("leader")), _text(self._key(name))
        compare = [{"key": leader, "target": "VALUE", "result": "EQUAL", "value": _text(self._me)}]
        if over is not None:
            compare.append({"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": over})
        put = {"request_put": {"key": key, "value": _text(raw), "lease": lease or 0}}
        look = [{"request_range": {"key": which}} for which in (leader, key)]
        done = self._ask(lambda client: client.transaction({"compare": compare, "success": [put], "failure": look}))
        if done.get("succeeded"):
            if over is not None:
                self._recorded = int(done["header"]["revision"])
            return True
        leads, there = ([*found["response_range"].get("kvs", ()), None][0] for found in done["responses"])
        if over is None or leads is None or leads["value"] != _text(self._me):
            self._until_s = 0.0
            raise Deposed(f"another coordinator may lead this job: {self._name} does not know this one any more")
        self._recorded = int(there["mod_revision"]) if there is not None else 0
        return False

    def close(self) -> None:
        """As Store.close."""
        self._over.set()
        self._until_s = 0.0
        self._revoke()
        for client in self._clients:
            client.session.close()

    def _revoke(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self._ask(lambda client: client.post(client.get_url("/lease/revoke"), json={"ID": lease}))
            except OSError:
                return  # it runs out by itself

    # ---- to find who leads

    def coordinator(self) -> str | None:
        """Where the leader is reached, host:port; None: nobody has said.

        Raises:
            OSError: etcd does not answer.
        """
        found = self._ask(lambda client: client.get(self._key("coordinator")))
        return found[0].decode(errors="replace") if found else None
