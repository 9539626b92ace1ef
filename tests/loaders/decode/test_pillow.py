from __future__ import annotations

from support.decoder_suite import DecoderSuite


class TestPillow(DecoderSuite):
    backend = "pillow"
