"""Conversations that vLLM writes by code, with items that were made before. CHIASM_TEST_MODELS is the folder of the models."""

import base64
import shutil
import tempfile
import unittest
from pathlib import Path

import transformers
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.multimodal.processing import ProcessorInputs

from chiasm_processor.greeting import greeting
from chiasm_processor.messages import KnownItem
from chiasm_processor.processor import UNTIMED, NotSupported, Processor
from chiasm_processor.updates import to_plain

from .test_helper import MODELS, PICTURES, flags

WRITTEN = {
    "qwen2vl": [*flags("qwen2vl"), "--tokenizer-mode", "deepseek_v32"],
    # Its files are in Mistral's own format, too, which vLLM prefers.
    "mistral_small": ["--model", str(MODELS / "mistral_small"), "--dtype", "float32"],
}
OPEN = {"add_generation_prompt": True}


def turns(first: dict, second: dict) -> list[dict]:
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
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(PICTURES[number]).decode()}"}}


class ConversationTest(unittest.TestCase):
    def test_a_conversation_with_known_items_is_what_vllm_makes_of_one_with_their_data(self) -> None:
        for model, with_flags in WRITTEN.items():
            with self.subTest(model):
                processor = Processor(with_flags)
                self.assertIs(greeting(processor)["writes_conversations"], True)
                renderer = processor.conversations._renderer
                request = ChatCompletionRequest(messages=turns(with_data(0), with_data(1)), **OPEN)
                params = request.build_chat_params(None, "auto").with_defaults({"tokenize": model == "mistral_small"})
                _, prompt = renderer.render_messages(request.messages, params)
                prompt = renderer._tokenize_singleton_prompt(prompt, request.build_tok_params(processor.config))
                media = processor.vllm.info.parse_mm_data(prompt["multi_modal_data"])
                expected = processor.vllm.apply(ProcessorInputs(prompt["prompt_token_ids"], media), UNTIMED)

                items = [processor.item("image", data, {}, {})[1] for data in PICTURES[:2]]
                known = [KnownItem("image", [to_plain(update) for update in updates]) for updates in items]
                for _ in range(2):
                    written = processor.chat(turns(numbered(0), numbered(1)), known, OPEN, {})
                    self.assertEqual(written.token_ids, expected["prompt_token_ids"])
                    places = expected["mm_placeholders"]["image"]
                    self.assertEqual([(at.offset, at.length) for at in written.placeholders], [(at.offset, at.length) for at in places])
                # Settings of Mistral's own go by other names.
                settings = OPEN | {"chat_template_kwargs": {"thinking": True}}
                if model == "mistral_small":
                    with self.assertRaisesRegex(Exception, "chat_template is not supported"):
                        processor.chat(turns(numbered(0), numbered(1)), known, settings, {})
                else:
                    self.assertNotEqual(processor.chat(turns(numbered(0), numbered(1)), known, settings, {}).token_ids, written.token_ids)
                    # Before it is tokenized as a whole.
                    too_long = [{"role": "user", "content": "long " * 20_000}]
                    with self.assertRaisesRegex(Exception, "maximum context length"):
                        processor.chat(too_long, [], OPEN, {})

    def test_items_that_change_places_keep_their_placeholders(self) -> None:
        processor = Processor(WRITTEN["qwen2vl"])
        items = [processor.item("image", data, {}, {})[1] for data in PICTURES[:2]]
        known = [KnownItem("image", [to_plain(update) for update in updates]) for updates in items]
        (first, second), swapped = (processor.chat(turns(*map(numbered, order)), known, OPEN, {}).placeholders for order in ((0, 1), (1, 0)))
        self.assertNotEqual(first.length, second.length)
        self.assertEqual([at.length for at in swapped], [first.length, second.length])
        self.assertEqual((swapped[1].offset, swapped[0].offset), (first.offset, second.offset + second.length - first.length))
        with self.assertRaisesRegex(ValueError, "without some"):
            processor.chat(turns(numbered(0), {"type": "text", "text": "no image"}), known, OPEN, {})

    def test_a_model_of_text_has_its_conversations_written_and_nothing_else(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            shutil.copytree(MODELS / "qwen2vl", directory, dirs_exist_ok=True)
            transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], vocab_size=500).save_pretrained(directory)
            with self.assertRaisesRegex(NotSupported, "takes no images"):
                Processor(["--model", directory])
            processor = Processor(["--model", directory, "--tokenizer-mode", "deepseek_v32"])
            self.assertEqual((greeting(processor)["limits"], greeting(processor)["own_prompts"]), ({}, []))
            written = processor.chat([{"role": "user", "content": "hello"}], [], OPEN, {})
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            text = "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜></think>"
            self.assertEqual(written.token_ids, tokenizer.encode(text, add_special_tokens=False))

    def test_conversations_of_a_chat_template_are_not_written_here(self) -> None:
        processor = Processor(flags("qwen2vl"))
        with self.assertRaisesRegex(ValueError, "chat template"):
            processor.chat(turns(numbered(0), numbered(1)), [], OPEN, {})


if __name__ == "__main__":
    unittest.main()
