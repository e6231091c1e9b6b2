"""Frames and proofs of one connection between two keepers, without its socket.

A frame is 4 bytes of length, then JSON.  The called keeper sends a challenge.  The caller
introduces itself and proves that it knows the run's secret.  The called keeper proves it too.  Then
messages flow both ways:

    called                                caller
      Challenge(version, nonce)   ->
                                  <-      Introduction(run, node, to_node, purpose, nonce, proof)
      Welcome(proof)              ->

A proof is an HMAC-SHA256 over both nonces, all claims and the role, so none can be sent back.
Until then a frame has at most 4 KiB.  Nothing is unpickled.
"""

import hashlib
import hmac
import json
import secrets
import struct
from dataclasses import dataclass
from typing import Any, Literal

from autockpt.executors.protocol import messages as p
from autockpt.values.errors import ConfigError, ProtocolError
from autockpt.values.record import from_data, parse_json, to_data, to_json

VERSION = 3
MAX_GREETING_BYTES = 4096
MAX_FRAME_BYTES = 64 * 2**20
_LENGTH = struct.Struct("!I")

Standing = Literal["busy", "settled", "leaving"]
"""busy: this node may still need the other nodes; settled: not now; leaving: never again."""

Purpose = Literal["control", "transfer"]
"""Content after the handshake: these messages, or the bytes of images (`transfer`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity that a keeper claims."""

    run_id: str
    node: int
    incarnation: p.Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """First message of the called keeper."""

    version: int
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """Answer of the caller."""

    caller: Identity
    to_node: int
    purpose: Purpose
    nonce: str
    proof: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Proof of the called keeper that it knows the secret, too."""

    proof: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingChanged:
    """Whether a keeper may leave depends on whether the others still need it."""

    standing: Standing


def frame(message: p.WireMessage | StandingChanged) -> bytes:
    """The bytes of a message.  Raises ProtocolError when it is too large."""
    if isinstance(message, StandingChanged):
        data: Any = {"type": "StandingChanged", "body": to_data(message)}
    else:
        data = p.message_to_data(message)
    text = json.dumps(data, separators=(",", ":")).encode()
    if len(text) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{data['type']} of {len(text)} bytes; at most {MAX_FRAME_BYTES} fit")
    return _LENGTH.pack(len(text)) + text


class Framer:
    """Frames messages; one that goes to many nodes in a row is encoded once."""

    def __init__(self) -> None:
        self._message: object = None
        self._bytes = b""

    def frame(self, message: p.WireMessage | StandingChanged) -> bytes:
        """As `frame`: a frozen message that is the last one again has the same bytes."""
        if message is not self._message:
            self._bytes = frame(message)
            self._message = message
        return self._bytes


class Channel:
    """One end of a connection: bytes in, messages out, and an `outbox` of bytes to send."""

    def __init__(
        self, secret: bytes, me: Identity, *, to_node: int | None, purpose: Purpose = "control"
    ) -> None:
        """`to_node`: whom we called; None: we were called."""
        self._secret = secret
        self._purpose: Purpose = purpose
        self._me = me
        self._to_node = to_node
        self._received = bytearray()
        self._nonces: tuple[str, str] = ("", "")
        """Nonces of the called keeper and of the caller."""
        self.peer: Identity | None = None
        """The proven identity of the other end; None: not yet."""
        self.outbox: list[bytes] = []
        if to_node is None:
            self._nonces = (secrets.token_hex(16), "")
            self._greet(Challenge(version=VERSION, nonce=self._nonces[0]))

    def feed(self, data: bytes) -> list[p.WireMessage | StandingChanged]:
        """The whole messages so far.  Raises ProtocolError; then the connection is worthless."""
        self._received += data
        messages = []
        try:
            while (text := self._next()) is not None:
                if self.peer is None:
                    self._greeting(parse_json(text))
                else:
                    messages.append(_message(parse_json(text)))
        except (ValueError, ConfigError) as error:
            raise ProtocolError(f"malformed message: {str(error)[:200]}") from None
        return messages

    def _next(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        limit = MAX_GREETING_BYTES if self.peer is None else MAX_FRAME_BYTES
        if length > limit:
            raise ProtocolError(f"a frame of {length} bytes; at most {limit} are allowed")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        text = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return text

    # ------------------------------------------------------------------ the handshake

    def _greeting(self, data: Any) -> None:
        if self._to_node is None:
            self._introduced(from_data(Introduction, data))
        elif not self._nonces[0]:
            self._challenged(from_data(Challenge, data))
        else:
            self._welcomed(from_data(Welcome, data))

    def _challenged(self, challenge: Challenge) -> None:
        assert self._to_node is not None
        if challenge.version != VERSION:
            raise ProtocolError(f"keeper speaks version {challenge.version}, we speak {VERSION}")
        if not challenge.nonce:
            raise ProtocolError("an empty challenge")
        self._nonces = (challenge.nonce, secrets.token_hex(16))
        proof = self._proof("caller", self._me, self._to_node)
        self._greet(
            Introduction(
                caller=self._me, to_node=self._to_node, purpose=self._purpose,
                nonce=self._nonces[1], proof=proof,
            )
        )  # fmt: skip

    def _introduced(self, said: Introduction) -> None:
        self._nonces = (self._nonces[0], said.nonce)
        if said.purpose != self._purpose:
            raise ProtocolError(f"comes for {said.purpose}, this is the port for {self._purpose}")
        if not hmac.compare_digest(
            said.proof.encode(), self._proof("caller", said.caller, said.to_node).encode()
        ):
            raise ProtocolError(f"who says to be node {said.caller.node} does not know the secret")
        if said.caller.run_id != self._me.run_id:
            raise ProtocolError(f"keeper of run {said.caller.run_id}, this is {self._me.run_id}")
        if said.to_node != self._me.node:
            raise ProtocolError(f"asks for node {said.to_node}, this is node {self._me.node}")
        proof = self._proof("called", said.caller, said.to_node)
        self.peer = said.caller
        self._greet(Welcome(proof=proof))

    def _welcomed(self, said: Welcome) -> None:
        assert self._to_node is not None
        expected = self._proof("called", self._me, self._to_node)
        if not hmac.compare_digest(said.proof.encode(), expected.encode()):
            raise ProtocolError(f"node {self._to_node} does not know the secret")
        self.peer = Identity(
            run_id=self._me.run_id, node=self._to_node, incarnation=self._me.incarnation
        )

    def _proof(self, role: str, caller: Identity, to_node: int) -> str:
        claims = [VERSION, role, self._purpose, to_data(caller), to_node, *self._nonces]
        return hmac.new(self._secret, json.dumps(claims).encode(), hashlib.sha256).hexdigest()

    def _greet(self, message: Challenge | Introduction | Welcome) -> None:
        text = to_json(message).encode()
        self.outbox.append(_LENGTH.pack(len(text)) + text)


def _message(data: Any) -> p.WireMessage | StandingChanged:
    if isinstance(data, dict) and data.get("type") == "StandingChanged":
        return from_data(StandingChanged, data.get("body"))
    return p.message_from_data(data)
