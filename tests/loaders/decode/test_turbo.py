from __future__ import annotations

from support.decoder_suite import DecoderSuite


class TestTurbo(DecoderSuite):
    backend = "turbo"
