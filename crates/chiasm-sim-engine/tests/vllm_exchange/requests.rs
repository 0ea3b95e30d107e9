//! The messages that a frontend sends, with their meanings in the form of vLLM's types.
//!
//! Fields that a meaning omits have vLLM's defaults. The bytes of tensors are not listed: byte `i`
//! is `(i * step + 3) % 251`.

use std::sync::Arc;

use bytes::Bytes;
use chiasm_backend::Constraint;
use chiasm_engine::wire::{
    EngineCoreRequest, ExtraArgs, FieldKind, InitMessage, LoraRequest, MmData, MmFeature, MmField,
    MmItem, RepetitionDetection, SamplingParams, StructuredOutputs, TensorData, Utility,
    Value as Packed, WireTensor, XGRAMMAR, request,
};
use chiasm_types::{Dtype, Placeholder, TokenId};
use serde_json::{Value, json};

/// The id of a call. vLLM's own ids are up to 64 bits long.
const CALL_ID: u64 = u64::MAX - 7;

/// A message and its meaning.
pub(crate) struct Message {
    pub(crate) name: &'static str,
    /// `add`, `abort`, `utility` or `init`.
    pub(crate) kind: &'static str,
    pub(crate) frames: Vec<Bytes>,
    pub(crate) means: Value,
}

pub(crate) fn all() -> Vec<Message> {
    let mut all = vec![
        plain_text(),
        greedy_text(),
        every_setting(),
        images(),
        cached(),
        lent(),
        abort(),
        init(),
    ];
    all.push(adapter());
    all.extend(constraints());
    all.extend(calls());
    all
}

fn add(name: &'static str, request: &EngineCoreRequest, means: Value) -> Message {
    Message { name, kind: "add", frames: request::encode(request), means }
}

fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

/// A request with a LoRA adapter.
fn adapter() -> Message {
    let name = "a@1".to_owned();
    let path = "/adapters/a".to_owned();
    let lora = LoraRequest { name, id: LoraRequest::MAX_ID, path };
    let means = json!({
        "request_id": "adapter", "prompt_token_ids": PROMPT, "arrival_time": 1_700_000_000.25,
        "sampling_params": {},
        "lora_request": {
            "lora_name": "a@1", "lora_int_id": LoraRequest::MAX_ID, "lora_path": "/adapters/a",
        },
    });
    add(
        "adapter",
        &EngineCoreRequest { lora_request: Some(Arc::new(lora)), ..request("adapter") },
        means,
    )
}

/// Returns one message for each constraint. A meaning has the fields of `StructuredOutputsParams`
/// that differ from the defaults.
fn constraints() -> Vec<Message> {
    let schema = r#"{"type":"object"}"#;
    let tag = r#"{"type":"structural_tag","format":{"type":"any_text"}}"#;
    let constraints = [
        ("json_schema", Constraint::JsonSchema(schema.into()), json!({"json": schema})),
        ("json_object", Constraint::JsonObject, json!({"json_object": true})),
        ("regex", Constraint::Regex("a+".into()), json!({"regex": "a+"})),
        (
            "grammar",
            Constraint::Grammar("root ::= \"a\"".into()),
            json!({"grammar": "root ::= \"a\""}),
        ),
        ("structural_tag", Constraint::StructuralTag(tag.into()), json!({"structural_tag": tag})),
    ];
    let message = |(name, constraint, mut means): (&'static str, Constraint, Value)| {
        let structured_outputs =
            Some(StructuredOutputs { constraint, backend: XGRAMMAR.to_owned() });
        let sampling_params = SamplingParams { structured_outputs, ..SamplingParams::default() };
        means["_backend"] = json!(XGRAMMAR);
        let means = json!({
            "request_id": name, "prompt_token_ids": PROMPT, "arrival_time": 1_700_000_000.25,
            "sampling_params": {"structured_outputs": means},
        });
        add(name, &EngineCoreRequest { sampling_params, ..request(name) }, means)
    };
    constraints.into_iter().map(message).collect()
}

/// Ids of all widths that msgpack has for numbers.
const PROMPT: [u32; 8] = [0, 1, 127, 128, 255, 256, 65_535, 151_643];

fn request(id: &str) -> EngineCoreRequest {
    EngineCoreRequest {
        request_id: id.to_owned(),
        prompt_token_ids: Arc::new(tokens(&PROMPT)),
        arrival_time: 1_700_000_000.25,
        ..EngineCoreRequest::default()
    }
}

fn plain_text() -> Message {
    let means = json!({
        "request_id": "plain", "prompt_token_ids": PROMPT, "arrival_time": 1_700_000_000.25,
        "sampling_params": {},
    });
    add("plain_text", &request("plain"), means)
}

fn greedy_text() -> Message {
    let sampling_params = SamplingParams {
        temperature: 0.0,
        max_tokens: 300,
        eos_token_id: Some(TokenId(2)),
        all_stop_token_ids: tokens(&[2]),
        ..SamplingParams::default()
    };
    let means = json!({
        "request_id": "greedy", "prompt_token_ids": PROMPT, "arrival_time": 1_700_000_000.25,
        "sampling_params": {
            "temperature": 0.0, "max_tokens": 300, "_eos_token_id": 2, "_all_stop_token_ids": [2],
        },
    });
    add("greedy_text", &EngineCoreRequest { sampling_params, ..request("greedy") }, means)
}

/// Returns some of the `kv_transfer_params` of an engine that keeps a prompt for another one.
fn kv_transfer_params() -> Packed {
    let blocks = Packed::Array(vec![Packed::Array(vec![7.into(), 300.into()])]);
    let params = [
        ("do_remote_prefill", true.into()),
        ("remote_block_ids", blocks),
        ("remote_port", 5600.into()),
    ];
    Packed::Map(params.into_iter().map(|(name, value)| (name.into(), value)).collect())
}

fn every_setting() -> Message {
    let sampling_params = SamplingParams {
        presence_penalty: 0.5,
        frequency_penalty: -0.25,
        repetition_penalty: 1.5,
        temperature: 0.75,
        top_p: 0.875,
        top_k: 40,
        min_p: 0.125,
        seed: Some(1 << 40),
        stop_token_ids: tokens(&[7, 70_000]),
        ignore_eos: true,
        max_tokens: 70_000,
        min_tokens: 3,
        logprobs: Some(5),
        prompt_logprobs: Some(-1),
        eos_token_id: None,
        all_stop_token_ids: tokens(&[7, 70_000]),
        logit_bias: vec![(TokenId(9), -100.0), (TokenId(300), 2.5)],
        allowed_token_ids: tokens(&[7, 9, 300, 70_000]),
        skip_reading_prefix_cache: Some(true),
        bad_words: vec![tokens(&[7]), tokens(&[300, 70_000])],
        structured_outputs: None,
        thinking_token_budget: Some(300),
        repetition_detection: Some(RepetitionDetection {
            max_pattern_size: 20,
            min_pattern_size: 2,
            min_count: 3,
        }),
        extra_args: Some(ExtraArgs {
            kv_transfer_params: Some(kv_transfer_params()),
            ec_transfer_params: None,
        }),
    };
    let request = EngineCoreRequest {
        sampling_params,
        cache_salt: Some("salt".into()),
        client_index: 1,
        priority: -3,
        trace_headers: vec![("traceparent".into(), "00-aa-bb-01".into())],
        external_req_id: Some("user's".into()),
        reasoning_ended: Some(true),
        reasoning_variables: vec![("thinking".into(), false), ("enable_thinking".into(), true)],
        ..request("every")
    };
    let means = json!({
        "request_id": "every", "prompt_token_ids": PROMPT, "arrival_time": 1_700_000_000.25,
        "cache_salt": "salt", "client_index": 1, "priority": -3,
        "trace_headers": {"traceparent": "00-aa-bb-01"}, "external_req_id": "user's",
        "reasoning_ended": true,
        "reasoning_parser_kwargs": {
            "chat_template_kwargs": {"thinking": false, "enable_thinking": true},
        },
        "sampling_params": {
            "presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.5,
            "temperature": 0.75, "top_p": 0.875, "top_k": 40, "min_p": 0.125,
            "seed": 1_u64 << 40, "stop_token_ids": [7, 70_000], "ignore_eos": true,
            "max_tokens": 70_000, "min_tokens": 3, "logprobs": 5, "prompt_logprobs": -1,
            "_all_stop_token_ids": [7, 70_000], "logit_bias": {"9": -100.0, "300": 2.5},
            "allowed_token_ids": [7, 9, 300, 70_000], "skip_reading_prefix_cache": true,
            "_bad_words_token_ids": [[7], [300, 70_000]], "thinking_token_budget": 300,
            "repetition_detection": {
                "max_pattern_size": 20, "min_pattern_size": 2, "min_count": 3,
            },
            "extra_args": {"kv_transfer_params": {
                "do_remote_prefill": true, "remote_block_ids": [[7, 300]], "remote_port": 5600,
            }},
        },
    });
    add("every_setting", &request, means)
}

fn tensor(dtype: Dtype, shape: &[usize], step: usize) -> WireTensor {
    let length = shape.iter().product::<usize>() * dtype.size();
    let data = (0..length).map(|i| ((i * step + 3) % 251) as u8).collect();
    WireTensor::new(dtype, shape.to_vec(), data).unwrap()
}

fn feature(name: &str, offset: usize, length: usize, data: Option<MmItem>) -> MmFeature {
    MmFeature {
        data,
        modality: "image".into(),
        identifier: format!("{name}-identifier"),
        position: Placeholder { offset, length, is_embed: None },
        mm_hash: Some(format!("{name}-hash")),
    }
}

/// Tensors below and above the size from which they are separate frames, in all kinds of fields.
fn images() -> Message {
    let flat =
        |dim| FieldKind::Flat { slices: vec![[Some(4), Some(12), None]], dim, keep_on_cpu: true };
    let list = MmData::List(vec![
        MmData::Tensor(tensor(Dtype::I64, &[2], 1)),
        MmData::Int(7),
        MmData::Float(0.5),
    ]);
    let first = MmItem(vec![
        ("pixel_values".into(), MmField::flat(tensor(Dtype::U8, &[24, 32], 7), 24)),
        ("image_grid_thw".into(), MmField::batched(tensor(Dtype::I64, &[3], 5), true)),
        (
            "patches".into(),
            MmField { data: Some(MmData::Tensor(tensor(Dtype::BF16, &[8, 2], 11))), kind: flat(1) },
        ),
        ("shared".into(), MmField::shared(tensor(Dtype::F32, &[1], 1), false)),
        (
            "nested".into(),
            MmField { data: Some(list), kind: FieldKind::Batched { keep_on_cpu: false } },
        ),
        ("none".into(), MmField { data: None, kind: FieldKind::Batched { keep_on_cpu: false } }),
    ]);
    let second = MmItem(vec![(
        "pixel_values".into(),
        MmField::batched(tensor(Dtype::F16, &[3, 16, 16], 13), false),
    )]);
    let mut masked = feature("second", 5, 3, Some(second));
    masked.position.is_embed = Some(vec![false, true, true]);
    masked.mm_hash = None;
    let request = EngineCoreRequest {
        mm_features: vec![feature("first", 1, 2, Some(first)), masked],
        ..request("images")
    };
    let batched = |keep_on_cpu: bool| -> Value {
        json!(["MultiModalBatchedField", {"keep_on_cpu": keep_on_cpu}])
    };
    let flat = |slice: [usize; 2], dim: i32, keep_on_cpu: bool| -> Value {
        let [start, end] = slice;
        let slices = json!([[start, end, null]]);
        json!(["MultiModalFlatField", {"slices": slices, "dim": dim, "keep_on_cpu": keep_on_cpu}])
    };
    let first = json!({
        "pixel_values": {
            "field": flat([0, 24], 0, false), "dtype": "uint8", "shape": [24, 32], "step": 7,
        },
        "image_grid_thw": {"field": batched(true), "dtype": "int64", "shape": [3], "step": 5},
        "patches": {
            "field": flat([4, 12], 1, true), "dtype": "bfloat16", "shape": [8, 2], "step": 11,
        },
        "shared": {
            "field": ["MultiModalSharedField", {"batch_size": 1, "keep_on_cpu": false}],
            "dtype": "float32", "shape": [1], "step": 1,
        },
        "nested": {
            "field": batched(false),
            "list": [{"dtype": "int64", "shape": [2], "step": 1}, {"number": 7}, {"number": 0.5}],
        },
        "none": {"field": batched(false), "number": null},
    });
    let second = json!({"pixel_values": {
        "field": batched(false), "dtype": "float16", "shape": [3, 16, 16], "step": 13,
    }});
    let means = json!({
        "request_id": "images", "prompt_token_ids": PROMPT, "arrival_time": 1_700_000_000.25,
        "sampling_params": {},
        "mm_features": [
            {
                "modality": "image", "identifier": "first-identifier", "mm_hash": "first-hash",
                "mm_position": {"offset": 1, "length": 2}, "data": first,
            },
            {
                "modality": "image", "identifier": "second-identifier", "mm_hash": null,
                "mm_position": {"offset": 5, "length": 3, "is_embed": [false, true, true]},
                "data": second,
            },
        ],
    });
    add("images", &request, means)
}

fn cached() -> Message {
    let request =
        EngineCoreRequest { mm_features: vec![feature("cached", 2, 4, None)], ..request("cached") };
    let means = json!({
        "request_id": "cached", "prompt_token_ids": PROMPT, "arrival_time": 1_700_000_000.25,
        "sampling_params": {},
        "mm_features": [{
            "modality": "image", "identifier": "cached-identifier", "mm_hash": "cached-hash",
            "mm_position": {"offset": 2, "length": 4}, "data": null,
        }],
    });
    add("cached_image", &request, means)
}

/// A tensor in shared memory, with a handle in place of its bytes, as `chiasm_vllm` resolves it.
fn lent() -> Message {
    let handle = json!({
        "chiasm": 1, "arena": "00000000000000ff", "lease": 3, "generation": 9, "offset": 4096,
        "length": 768,
    });
    let map = handle.as_object().unwrap().iter().map(|(key, value)| {
        let value =
            value.as_str().map_or_else(|| Packed::from(value.as_u64().unwrap()), Packed::from);
        (Packed::from(key.as_str()), value)
    });
    let data = TensorData::OutOfBand(Packed::Map(map.collect()));
    let tensor = WireTensor { dtype: "uint8".into(), shape: vec![24, 32], data };
    let item = MmItem(vec![("pixel_values".into(), MmField::flat(tensor, 24))]);
    let request = EngineCoreRequest {
        mm_features: vec![feature("lent", 2, 4, Some(item))],
        ..request("lent")
    };
    let field =
        json!(["MultiModalFlatField", {"slices": [[0, 24, null]], "dim": 0, "keep_on_cpu": false}]);
    let pixels = json!({"field": field, "dtype": "uint8", "shape": [24, 32], "handle": handle});
    let means = json!({
        "request_id": "lent", "prompt_token_ids": PROMPT, "arrival_time": 1_700_000_000.25,
        "sampling_params": {},
        "mm_features": [{
            "modality": "image", "identifier": "lent-identifier", "mm_hash": "lent-hash",
            "mm_position": {"offset": 2, "length": 4}, "data": {"pixel_values": pixels},
        }],
    });
    add("lent_image", &request, means)
}

fn abort() -> Message {
    let ids = ["one".to_owned(), "two".to_owned()];
    Message { name: "abort", kind: "abort", frames: request::encode_abort(&ids), means: json!(ids) }
}

/// The methods that Chiasm calls. `chiasm_attach` is the plugin's.
fn calls() -> Vec<Message> {
    let call = |name, method: &str, args: Vec<Packed>, means| {
        let call = Utility { client_index: 0, call_id: CALL_ID, method: method.to_owned(), args };
        Message { name, kind: "utility", frames: request::encode_utility(&call), means }
    };
    let lora = LoraRequest { name: "a@1".to_owned(), id: 7, path: "/adapters/a".to_owned() };
    let lora_fields = json!(["a@1", 7, "/adapters/a"]);
    vec![
        call(
            "add_lora",
            "add_lora",
            vec![lora.to_value()],
            json!([0, CALL_ID, "add_lora", [lora_fields]]),
        ),
        call("remove_lora", "remove_lora", vec![7.into()], json!([0, CALL_ID, "remove_lora", [7]])),
        call(
            "reset_mm_cache",
            "reset_mm_cache",
            Vec::new(),
            json!([0, CALL_ID, "reset_mm_cache", []]),
        ),
        call(
            "is_scheduler_paused",
            "is_scheduler_paused",
            Vec::new(),
            json!([0, CALL_ID, "is_scheduler_paused", []]),
        ),
        call(
            "reset_prefix_cache",
            "reset_prefix_cache",
            vec![false.into(), false.into()],
            json!([0, CALL_ID, "reset_prefix_cache", [false, false]]),
        ),
        call(
            "chiasm_attach",
            "chiasm_attach",
            vec!["arena-1".into()],
            json!([0, CALL_ID, "chiasm_attach", ["arena-1"]]),
        ),
    ]
}

fn init() -> Message {
    let input = "ipc:///run/chiasm/engine0.in";
    let output = "tcp://127.0.0.1:5000";
    let frames = vec![InitMessage::new(input, output).encode()];
    Message {
        name: "init",
        kind: "init",
        frames,
        means: json!({"inputs": [input], "outputs": [output]}),
    }
}
