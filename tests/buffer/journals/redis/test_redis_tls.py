"""A Redis behind TLS: `rediss://` with the right certificates, and with wrong ones."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.buffer.journals.redis.journal import RedisJournal
from asyncrl.buffer.ledger.tickets import State
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import ConfigError
from asyncrl.core.experience import encode_group
from asyncrl.core.runtime.threads import ThreadEvent
from tests.buffer.journals.journal_parts import begin, commit, push
from tests.buffer.journals.redis.redis_parts import administer, plain_redis
from tests.buffer.journals.redis.test_journal_redis import RIGHTS
from tests.buffer.journals.redis.tls_parts import Certificate, make_certificate, tls_front
from tests.buffer.parts import GROUP_SIZE, SETTINGS, make_group

USER = "buffer:secret@"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def redis_url(folder: Path) -> Iterator[str]:
    with plain_redis(folder) as url:
        administer(url, ("ACL", "SETUSER", "buffer", "on", ">secret", *RIGHTS.split()))
        yield url


@pytest.fixture(scope="module")
def here(folder: Path) -> Certificate:
    return make_certificate(folder, "here", "127.0.0.1")


def open_store(url: str, run: str) -> ExperienceStore:
    return ExperienceStore(SETTINGS, RedisJournal(lambda: url, run), GROUP_SIZE, True, now=0.0)


def test_a_journal_behind_tls_keeps_what_it_acknowledged_through_a_cut_and_a_restart(
    redis_url: str, here: Certificate
) -> None:
    with tls_front(redis_url, here) as front:
        url = f"rediss://{USER}127.0.0.1:{front.port}/0?ssl_ca_certs={here.file}"
        store = open_store(url, "kept")
        begin(store)
        first = push(store)
        commit(store)
        front.cut()
        second = push(store)
        commit(store)
        assert store.journal.status().redis == f"rediss://127.0.0.1:{front.port}/0"
        assert store.journal.counters["redis_wiped"] == 0
        store.journal.close()
        again = open_store(url, "kept")
        assert again.ledger.state.counts[State.STORED] == 2
        for ticket in (first, second):
            assert again.journal.read(ticket, 1) == encode_group(make_group(ticket))
        again.journal.close()


@pytest.mark.parametrize(
    ("presented", "query", "problem"),
    [
        ("here", "", r"not trusted here.*\?ssl_ca_certs=FILE"),
        ("here", "?ssl_ca_certs={folder}/other.pem", r"not trusted here.*\?ssl_ca_certs=FILE"),
        (
            "elsewhere",
            "?ssl_ca_certs={folder}/elsewhere.pem",
            r"of another host.*Write the host in buffer\.url",
        ),
        ("here", "?ssl_ca_certs={folder}/missing.pem", r"not on this machine.*Check ssl_ca_certs"),
        ("here", "?ssl_ca_cert={folder}/here.pem", r"a rediss:// URL does not take this query"),
    ],
    ids=["no-ca", "wrong-ca", "wrong-host", "no-file", "misspelt"],
)
def test_a_certificate_that_does_not_fit_is_a_config_error_that_names_what_to_set(
    redis_url: str, folder: Path, here: Certificate, presented: str, query: str, problem: str
) -> None:
    make_certificate(folder, "other", "127.0.0.1")
    shown = here if presented == "here" else make_certificate(folder, presented, "redis.example")
    with tls_front(redis_url, shown) as front:
        url = f"rediss://{USER}127.0.0.1:{front.port}/0{query.format(folder=folder)}"
        with pytest.raises(ConfigError, match=problem) as caught:
            RedisJournal(lambda: url, "refused", connect_deadline_s=20.0)
    assert "secret" not in str(caught.value)


def test_a_redis_that_wants_certificates_of_its_clients_takes_the_right_one(
    redis_url: str, folder: Path, here: Certificate
) -> None:
    ours = make_certificate(folder, "ours", "buffer.example")
    with tls_front(redis_url, here, clients=ours) as front:
        url = f"rediss://{USER}127.0.0.1:{front.port}/0?ssl_ca_certs={here.file}"
        shown = f"{url}&ssl_certfile={ours.file}&ssl_keyfile={ours.key_file}"
        store = open_store(shown, "shown")
        begin(store)
        commit(store)
        store.journal.close()


def test_a_redis_that_wants_certificates_of_its_clients_says_so(here: Certificate) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(here.file))
    context.load_cert_chain(here.file, here.key_file)
    context.verify_mode = ssl.CERT_REQUIRED
    is_over = ThreadEvent()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:  # as OpenSSL's servers do: asyncio hangs up without an alert
            end = context.wrap_socket(listener.accept()[0], server_side=True, do_handshake_on_connect=False)
            with end:
                with contextlib.suppress(ssl.SSLError):
                    end.do_handshake()
                is_over.wait(60.0)

        thread = threading.Thread(target=refuse)
        thread.start()
        url = f"rediss://127.0.0.1:{listener.getsockname()[1]}/0?ssl_ca_certs={here.file}"
        with pytest.raises(ConfigError, match=r"wants a certificate of its clients.*\?ssl_certfile=FILE"):
            RedisJournal(lambda: url, "refused", connect_deadline_s=5.0)
        is_over.set()
        thread.join(60.0)


def test_settings_of_tls_in_a_url_without_tls_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"TLS settings need rediss://"):
        RedisJournal(lambda: "redis://127.0.0.1:1/0?ssl_ca_certs=x", "run", connect_deadline_s=0.1)
