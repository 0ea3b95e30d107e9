//! The structural tags of the known formats.

use crate::tag::TagForm;

static JSON_TAG: TagForm = TagForm {
    block: ("", ""),
    begin: ("<tool_call>\n{\"name\": \"", "\", \"arguments\": "),
    alternative: None,
    number: "",
    style: "json",
    end: "}\n</tool_call>",
    separator: "",
    trigger: "<tool_call>",
    token: "",
};
pub(super) static HERMES_TAG: TagForm =
    TagForm { alternative: Some(("<tool_call>{\"name\": \"", "}</tool_call>")), ..JSON_TAG };
pub(super) static LLAMA_TAG: TagForm = TagForm {
    begin: ("{\"name\": \"", "\", \"parameters\": "),
    end: "}",
    separator: "; ",
    trigger: "{\"name\": ",
    ..JSON_TAG
};
pub(super) static QWEN3_CODER_TAG: TagForm = TagForm {
    begin: ("<tool_call>\n<function=", ">\n"),
    style: "qwen_xml",
    end: "\n</function>\n</tool_call>",
    trigger: "<tool_call>\n<function=",
    separator: "\n",
    ..JSON_TAG
};
/// vLLM has no tag for this format. Calls are written as in `qwen3_coder`, except for the names of
/// the tags around them.
pub(super) static SEED_OSS_TAG: TagForm = TagForm {
    begin: ("<seed:tool_call>\n<function=", ">\n"),
    end: "\n</function>\n</seed:tool_call>",
    trigger: "<seed:tool_call>\n<function=",
    ..QWEN3_CODER_TAG
};
/// vLLM uses a grammar of `mistral_common` instead, which requires that library's tokenizer.
pub(super) static MISTRAL_TAG: TagForm = TagForm {
    begin: ("[TOOL_CALLS]", "[ARGS]"),
    alternative: None,
    end: "",
    separator: "",
    trigger: "[TOOL_CALLS]",
    token: "[ARGS]",
    ..JSON_TAG
};
pub(super) static GLM45_TAG: TagForm = TagForm {
    begin: ("<tool_call>", ""),
    style: "glm_xml",
    end: "</tool_call>",
    separator: "",
    ..JSON_TAG
};
pub(super) static DEEPSEEK_V3_TAG: TagForm = TagForm {
    block: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    begin: ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
    end: "\n```<｜tool▁call▁end｜>",
    trigger: "<｜tool▁calls▁begin｜>",
    separator: "\n",
    ..JSON_TAG
};
pub(super) static DEEPSEEK_V31_TAG: TagForm = TagForm {
    begin: ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    end: "<｜tool▁call▁end｜>",
    separator: "",
    ..DEEPSEEK_V3_TAG
};
pub(super) static DEEPSEEK_V32_TAG: TagForm = TagForm {
    block: ("\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    begin: ("<｜DSML｜invoke name=\"", "\">\n"),
    style: "deepseek_xml",
    end: "</｜DSML｜invoke>\n",
    separator: "",
    trigger: "<｜DSML｜function_calls>",
    ..JSON_TAG
};
pub(super) static DEEPSEEK_V4_TAG: TagForm = TagForm {
    block: ("\n\n<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
    trigger: "<｜DSML｜tool_calls>",
    ..DEEPSEEK_V32_TAG
};
pub(super) static KIMI_K2_TAG: TagForm = TagForm {
    block: ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begin: ("<|tool_call_begin|>functions.", ":"),
    number: "<|tool_call_argument_begin|>",
    end: "<|tool_call_end|>",
    separator: "",
    trigger: "<|tool_calls_section_begin|>",
    ..JSON_TAG
};
pub(super) static MINIMAX_M2_TAG: TagForm = TagForm {
    block: ("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
    begin: ("<invoke name=\"", "\">\n"),
    style: "minimax_xml",
    end: "</invoke>\n",
    separator: "",
    trigger: "<minimax:tool_call>",
    ..JSON_TAG
};
pub(super) static LONGCAT_TAG: TagForm = TagForm {
    begin: ("<longcat_tool_call>\n{\"name\": \"", "\", \"arguments\": "),
    alternative: Some(("<longcat_tool_call>{\"name\": \"", "}</longcat_tool_call>")),
    end: "}\n</longcat_tool_call>",
    trigger: "<longcat_tool_call>",
    ..JSON_TAG
};
