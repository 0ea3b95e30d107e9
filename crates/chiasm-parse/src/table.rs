//! The known formats, under the names of vLLM's parsers.
//!
//! Sources: `vllm/tool_parsers`, `vllm/reasoning` and `vllm/parser` of vLLM 0.33, and the models'
//! chat templates.

use crate::calls::braces;
use crate::calls::json;
use crate::calls::section::{self, NamePosition};
use crate::calls::tagged;
use crate::syntax::{Calls, Kind};

mod reasoning;
mod tags;

pub(crate) use reasoning::REASONING;
use tags::{
    DEEPSEEK_V3_TAG, DEEPSEEK_V4_TAG, DEEPSEEK_V31_TAG, DEEPSEEK_V32_TAG, GLM45_TAG, HERMES_TAG,
    KIMI_K2_TAG, LLAMA_TAG, LONGCAT_TAG, MINIMAX_M2_TAG, MISTRAL_TAG, QWEN3_CODER_TAG,
    SEED_OSS_TAG,
};

/// The syntax of calls for each tool parser.
pub(crate) static CALLS: &[(&[&str], Calls)] = &[
    (
        &["hermes", "qwen3_json"],
        Calls {
            openings: &[("<tool_call>", Kind::Json(&HERMES))],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&HERMES_TAG),
        },
    ),
    (
        &["longcat"],
        Calls {
            openings: &[("<longcat_tool_call>", Kind::Json(&LONGCAT))],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&LONGCAT_TAG),
        },
    ),
    (
        &["llama3_json", "llama4_json"],
        Calls {
            openings: &[("<|python_tag|>", Kind::Json(&LLAMA_TAGGED)), ("{", Kind::Json(&LLAMA))],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&LLAMA_TAG),
        },
    ),
    (
        &["llama4_pythonic", "pythonic"],
        Calls {
            openings: &[
                ("<|python_start|>", Kind::Python("<|python_start|>", "<|python_end|>")),
                ("[", Kind::Python("", "")),
            ],
            drops_later_text: true,
            must_come_first: true,
            tag: None,
        },
    ),
    (
        &["mistral"],
        Calls {
            openings: &[
                ("[TOOL_CALLS]", Kind::Section(&MISTRAL)),
                // Models with a tokenizer before version 11 write a JSON list.
                ("[TOOL_CALLS][", Kind::Json(&MISTRAL_LIST)),
                ("[TOOL_CALLS] [", Kind::Json(&MISTRAL_LIST)),
                ("[TOOL_CALLS]{", Kind::Json(&MISTRAL_LIST)),
                ("[TOOL_CALLS] {", Kind::Json(&MISTRAL_LIST)),
            ],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&MISTRAL_TAG),
        },
    ),
    (
        &["deepseek_v3"],
        Calls {
            openings: &[("<｜tool▁calls▁begin｜>", Kind::Section(&DEEPSEEK_V3))],
            drops_later_text: false,
            must_come_first: false,
            tag: Some(&DEEPSEEK_V3_TAG),
        },
    ),
    (
        &["deepseek_v31"],
        Calls {
            openings: &[("<｜tool▁calls▁begin｜>", Kind::Section(&DEEPSEEK_V31))],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&DEEPSEEK_V31_TAG),
        },
    ),
    (
        &["deepseek_v32"],
        Calls {
            openings: &[
                ("<｜DSML｜function_calls>", Kind::Tagged(&DEEPSEEK_V32)),
                ("<｜DSML｜invoke name=", Kind::Tagged(&DEEPSEEK_V32)),
            ],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&DEEPSEEK_V32_TAG),
        },
    ),
    (
        &["deepseek_v4"],
        Calls {
            openings: &[
                ("<｜DSML｜tool_calls>", Kind::Tagged(&DEEPSEEK_V4)),
                ("<｜DSML｜invoke name=", Kind::Tagged(&DEEPSEEK_V4)),
            ],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&DEEPSEEK_V4_TAG),
        },
    ),
    (
        &["kimi_k2"],
        Calls {
            openings: &[("<|tool_calls_section_begin|>", Kind::Section(&KIMI_K2))],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&KIMI_K2_TAG),
        },
    ),
    (
        &["qwen3_coder", "qwen3_xml", "step3p5", "step5"],
        Calls {
            openings: &[
                ("<tool_call>", Kind::Tagged(&QWEN3_CODER)),
                ("<function=", Kind::Tagged(&QWEN3_CODER)),
            ],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&QWEN3_CODER_TAG),
        },
    ),
    (
        &["seed_oss"],
        Calls {
            openings: &[
                ("<seed:tool_call>", Kind::Tagged(&SEED_OSS)),
                ("<function=", Kind::Tagged(&SEED_OSS)),
            ],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&SEED_OSS_TAG),
        },
    ),
    (
        &["glm45", "glm47", "ling3"],
        Calls {
            openings: &[("<tool_call>", Kind::Tagged(&GLM45))],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&GLM45_TAG),
        },
    ),
    (
        &["minimax_m2"],
        Calls {
            openings: &[
                ("<minimax:tool_call>", Kind::Tagged(&MINIMAX_M2)),
                ("<invoke name=", Kind::Tagged(&MINIMAX_M2)),
                ("</minimax:tool_call>", Kind::Dropped),
            ],
            drops_later_text: true,
            must_come_first: false,
            tag: Some(&MINIMAX_M2_TAG),
        },
    ),
    (
        &["gemma4"],
        Calls {
            openings: &[("<|tool_call>", Kind::Braces(&GEMMA4)), ("<tool_call|>", Kind::Dropped)],
            drops_later_text: true,
            must_come_first: false,
            tag: None,
        },
    ),
    (
        &["functiongemma"],
        Calls {
            openings: &[("<start_function_call>", Kind::Braces(&FUNCTION_GEMMA))],
            drops_later_text: true,
            must_come_first: false,
            tag: None,
        },
    ),
];

/// The syntax of calls in an answer that a schema constrains to a list of calls
/// (`get_json_schema_from_tools`, `vllm/tool_parsers/utils.py`).
pub(crate) static LISTED: Calls = Calls {
    openings: &[(
        "[",
        Kind::Json(&json::Form {
            open: "",
            allows_list: true,
            close: "",
            separator: None,
            allows_missing_arguments: false,
        }),
    )],
    drops_later_text: true,
    must_come_first: true,
    tag: None,
};

static HERMES: json::Form = json::Form {
    open: "<tool_call>",
    allows_list: false,
    close: "</tool_call>",
    separator: None,
    allows_missing_arguments: false,
};
static LONGCAT: json::Form =
    json::Form { open: "<longcat_tool_call>", close: "</longcat_tool_call>", ..HERMES };
static LLAMA: json::Form = json::Form {
    open: "",
    allows_list: false,
    close: "",
    separator: Some(';'),
    allows_missing_arguments: false,
};
static LLAMA_TAGGED: json::Form = json::Form { open: "<|python_tag|>", ..LLAMA };
static MISTRAL_LIST: json::Form = json::Form {
    open: "[TOOL_CALLS]",
    allows_list: true,
    close: "",
    separator: None,
    allows_missing_arguments: true,
};

static MISTRAL: section::Form = section::Form {
    open: "[TOOL_CALLS]",
    call: "[TOOL_CALLS]",
    arguments: &["[ARGS]", "{"],
    name: NamePosition::Before("[CALL_ID]"),
    end: &[],
    close: &[],
};
static DEEPSEEK_V3: section::Form = section::Form {
    open: "<｜tool▁calls▁begin｜>",
    call: "<｜tool▁call▁begin｜>",
    arguments: &["\n```json\n"],
    name: NamePosition::After("<｜tool▁sep｜>"),
    end: &["\n```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"],
    close: &["<｜tool▁calls▁end｜>"],
};
static DEEPSEEK_V31: section::Form = section::Form {
    open: "<｜tool▁calls▁begin｜>",
    call: "<｜tool▁call▁begin｜>",
    arguments: &["<｜tool▁sep｜>"],
    name: NamePosition::Whole,
    end: &["<｜tool▁call▁end｜>"],
    close: &["<｜tool▁calls▁end｜>"],
};
static KIMI_K2: section::Form = section::Form {
    open: "<|tool_calls_section_begin|>",
    call: "<|tool_call_begin|>",
    arguments: &["<|tool_call_argument_begin|>"],
    name: NamePosition::InId,
    end: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
    close: &["<|tool_calls_section_end|>"],
};

static QWEN3_CODER: tagged::Form = tagged::Form {
    open: "<tool_call>",
    call: "<function=",
    name_end: ">",
    key: "<parameter=",
    key_end: ">",
    value: "",
    value_end: "</parameter>",
    call_end: "</function>",
    close: "</tool_call>",
    trims_lines: true,
    has_type_attribute: false,
};
static SEED_OSS: tagged::Form =
    tagged::Form { open: "<seed:tool_call>", close: "</seed:tool_call>", ..QWEN3_CODER };
static GLM45: tagged::Form = tagged::Form {
    open: "<tool_call>",
    call: "",
    name_end: "",
    key: "<arg_key>",
    key_end: "</arg_key>",
    value: "<arg_value>",
    value_end: "</arg_value>",
    call_end: "</tool_call>",
    close: "",
    trims_lines: false,
    has_type_attribute: false,
};
static MINIMAX_M2: tagged::Form = tagged::Form {
    open: "<minimax:tool_call>",
    call: "<invoke name=",
    name_end: ">",
    key: "<parameter name=",
    key_end: ">",
    value: "",
    value_end: "</parameter>",
    call_end: "</invoke>",
    close: "</minimax:tool_call>",
    trims_lines: false,
    has_type_attribute: false,
};
static DEEPSEEK_V32: tagged::Form = tagged::Form {
    open: "<｜DSML｜function_calls>",
    call: "<｜DSML｜invoke name=",
    name_end: ">",
    key: "<｜DSML｜parameter name=",
    key_end: ">",
    value: "",
    value_end: "</｜DSML｜parameter>",
    call_end: "</｜DSML｜invoke>",
    close: "</｜DSML｜function_calls>",
    trims_lines: false,
    has_type_attribute: true,
};
static DEEPSEEK_V4: tagged::Form =
    tagged::Form {
        open: "<｜DSML｜tool_calls>", close: "</｜DSML｜tool_calls>", ..DEEPSEEK_V32
    };

static GEMMA4: braces::Form =
    braces::Form { open: "<|tool_call>", quote: "<|\"|>", close: "<tool_call|>" };
static FUNCTION_GEMMA: braces::Form =
    braces::Form { open: "<start_function_call>", quote: "<escape>", close: "<end_function_call>" };
