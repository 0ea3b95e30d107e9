"""Tests of conversations that vLLM renders by code, with items that were made before.

CHIASM_TEST_MODELS is the folder of the models.
"""

import base64
import shutil
import tempfile
import unittest
from typing import Any

import transformers
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.multimodal.processing import ProcessorInputs

from chiasm_processor.greeting import build_greeting
from chiasm_processor.messages import KnownItem, Placeholder
from chiasm_processor.processor import UNTIMED, NotSupported, Processor
from chiasm_processor.updates import to_plain

from .test_processor import MODELS, PICTURES, flags

FLAGS_BY_MODEL = {
    "qwen2vl": [*flags("qwen2vl"), "--tokenizer-mode", "deepseek_v32"],
    # Its files also have Mistral's own format, which vLLM prefers.
    "mistral_small": ["--model", str(MODELS / "mistral_small"), "--dtype", "float32"],
}
SETTINGS = {"add_generation_prompt": True}


def conversation(first: dict, second: dict) -> list[dict]:
    text = {"type": "text", "text": "What is this?"}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text, first]},
        {"role": "assistant", "content": "A picture."},
        {"role": "user", "content": [second, text]},
    ]


def numbered(number: int) -> dict:
    return {"type": "image_url", "image_url": None, "uuid": str(number)}


def with_data(number: int) -> dict:
    data = base64.b64encode(PICTURES[number]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}


def known_items(processor: Processor) -> list[KnownItem]:
    items = [processor.make_item("image", data, {}, {})[1] for data in PICTURES[:2]]
    return [KnownItem("image", [to_plain(update) for update in updates]) for updates in items]


def ranges(placeholders: list[Any]) -> list[tuple[int, int]]:
    return [(placeholder.offset, placeholder.length) for placeholder in placeholders]


class ConversationTest(unittest.TestCase):
    def test_chat_with_known_items_equals_vllms_chat_with_data(self) -> None:
        for model, model_flags in FLAGS_BY_MODEL.items():
            with self.subTest(model):
                processor = Processor(model_flags)
                self.assertIs(build_greeting(processor)["writes_conversations"], True)
                renderer = processor.conversations._renderer
                messages = conversation(with_data(0), with_data(1))
                request = ChatCompletionRequest(messages=messages, **SETTINGS)
                defaults = {"tokenize": model == "mistral_small"}
                params = request.build_chat_params(None, "auto").with_defaults(defaults)
                _, prompt = renderer.render_messages(request.messages, params)
                tokenization = request.build_tok_params(processor.config)
                prompt = renderer._tokenize_singleton_prompt(prompt, tokenization)
                media = processor.vllm_processor.info.parse_mm_data(prompt["multi_modal_data"])
                inputs = ProcessorInputs(prompt["prompt_token_ids"], media)
                expected = processor.vllm_processor.apply(inputs, UNTIMED)

                known = known_items(processor)
                numbered_messages = conversation(numbered(0), numbered(1))
                for _ in range(2):
                    expanded = processor.expand_chat(numbered_messages, known, SETTINGS, {})
                    self.assertEqual(expanded.token_ids, expected["prompt_token_ids"])
                    expected_ranges = ranges(expected["mm_placeholders"]["image"])
                    self.assertEqual(ranges(expanded.placeholders), expected_ranges)
                # Mistral's tokenizer has other names for its settings.
                settings = SETTINGS | {"chat_template_kwargs": {"thinking": True}}
                if model == "mistral_small":
                    with self.assertRaisesRegex(Exception, "chat_template is not supported"):
                        processor.expand_chat(numbered_messages, known, settings, {})
                else:
                    thinking = processor.expand_chat(numbered_messages, known, settings, {})
                    self.assertNotEqual(thinking.token_ids, expanded.token_ids)
                    # Refused before all of it is tokenized.
                    too_long = [{"role": "user", "content": "long " * 20_000}]
                    with self.assertRaisesRegex(Exception, "maximum context length"):
                        processor.expand_chat(too_long, [], SETTINGS, {})

    def test_reordered_items_keep_their_placeholders(self) -> None:
        processor = Processor(FLAGS_BY_MODEL["qwen2vl"])
        known = known_items(processor)

        def placeholders(*order: int) -> list[Placeholder]:
            messages = conversation(*map(numbered, order))
            return processor.expand_chat(messages, known, SETTINGS, {}).placeholders

        first, second = placeholders(0, 1)
        swapped = placeholders(1, 0)
        self.assertNotEqual(first.length, second.length)
        self.assertEqual([range_.length for range_ in swapped], [first.length, second.length])
        self.assertEqual(swapped[1].offset, first.offset)
        self.assertEqual(swapped[0].offset, second.offset + second.length - first.length)
        with self.assertRaisesRegex(ValueError, "without some"):
            messages = conversation(numbered(0), {"type": "text", "text": "no image"})
            processor.expand_chat(messages, known, SETTINGS, {})

    def test_text_model_supports_conversations_only(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            shutil.copytree(MODELS / "qwen2vl", directory, dirs_exist_ok=True)
            config = transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], vocab_size=500)
            config.save_pretrained(directory)
            with self.assertRaisesRegex(NotSupported, "takes no images"):
                Processor(["--model", directory])
            processor = Processor(["--model", directory, "--tokenizer-mode", "deepseek_v32"])
            greeting = build_greeting(processor)
            self.assertEqual((greeting["limits"], greeting["own_prompts"]), ({}, []))
            expanded = processor.expand_chat(
                [{"role": "user", "content": "hello"}], [], SETTINGS, {}
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            text = "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜></think>"
            expected = tokenizer.encode(text, add_special_tokens=False)
            self.assertEqual(expanded.token_ids, expected)

    def test_conversation_of_chat_template_is_refused(self) -> None:
        processor = Processor(flags("qwen2vl"))
        with self.assertRaisesRegex(ValueError, "chat template"):
            processor.expand_chat(conversation(numbered(0), numbered(1)), [], SETTINGS, {})


if __name__ == "__main__":
    unittest.main()
