//! Frames captured from a real engine: they decode to the original values, and encoding the values
//! gives the same bytes.

use std::path::Path;

use bytes::Bytes;
use chiasm_engine::wire::handshake::{Addresses, KvEventsConfig};
use chiasm_engine::wire::{
    ClientMessage, EngineCoreOutputs, EngineCoreRequest, EngineMessage, EngineReady, FieldKind,
    FinishReason, Hello, InitMessage, StopReason, TensorData, Utility, UtilityOutput, Value,
    handshake, output, request,
};
use chiasm_types::{Placeholder, TokenId};

fn frame(path: &str) -> Bytes {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).into()
}

fn frames(message: &str, count: usize) -> Vec<Bytes> {
    (0..count).map(|i| frame(&format!("{message}.f{i}.bin"))).collect()
}

fn add(frames: &[Bytes]) -> EngineCoreRequest {
    match request::decode(frames).unwrap() {
        ClientMessage::Add(request) => *request,
        other => panic!("not an ADD: {other:?}"),
    }
}

fn utility(message: &str) -> Utility {
    let frames = frames(&format!("utility/{message}"), 2);
    match request::decode(&frames).unwrap() {
        ClientMessage::Utility(call) => {
            assert_eq!(request::encode_utility(&call), frames, "{message} is encoded as vLLM does");
            call
        }
        other => panic!("not a UTILITY: {other:?}"),
    }
}

/// Decodes outputs and checks that they round-trip.
fn outputs(frames: &[Bytes]) -> EngineCoreOutputs {
    let decoded = output::decode(frames).unwrap();
    let EngineMessage::Outputs(outputs) = decoded.clone() else { panic!("not EngineCoreOutputs") };
    assert_eq!(output::decode(&output::encode(&outputs)).unwrap(), decoded);
    outputs
}

fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
    ids.into_iter().map(TokenId).collect()
}

/// Returns the prompt of the captures: 40 text tokens, one image of 80, 3 text tokens.
fn image_prompt() -> Vec<TokenId> {
    tokens((40..80).chain([340]).chain(std::iter::repeat_n(343, 80)).chain([341, 20, 21, 22]))
}

#[test]
fn handshake_statuses_round_trip() {
    for dir in ["handshake", "handshake_dp2_rank1"] {
        let hello = frame(&format!("{dir}/hello.f1.bin"));
        assert_eq!(Hello::decode(&hello).unwrap(), Hello::hello());
        assert_eq!(Hello::hello().encode(), hello);
        assert!(Hello::decode(&frame(&format!("{dir}/ready.f1.bin"))).unwrap().is_ready());
    }
    assert_eq!(Hello::ready().encode(), frame("handshake/ready.f1.bin"));
}

#[test]
fn identity_encodes_rank() {
    for (dir, rank) in [("handshake", 0), ("handshake_dp2_rank1", 1)] {
        let identity = frame(&format!("{dir}/hello.f0.bin"));
        assert_eq!(handshake::rank(&identity), Some(rank));
        assert_eq!(handshake::identity(rank), identity[..]);
    }
}

#[test]
fn init_equals_captured_bytes() {
    let captured = frame("handshake/init.f1.bin");
    let init = InitMessage::new("ipc:///run/chiasm/engine0.in", "ipc:///run/chiasm/engine0.out");
    assert_eq!(init.encode(), captured);
    let decoded = InitMessage::decode(&captured).unwrap();
    assert_eq!(decoded, init);
    assert_eq!(decoded.addresses, Addresses { ..init.addresses });
}

#[test]
fn ready_report_decodes() {
    let captured = frame("handshake/register_ready_response.f1.bin");
    let ready = EngineReady::decode(&captured).unwrap();
    assert_eq!(ready.vllm_version, "0.32.0");
    assert_eq!(ready.max_model_len, 8192);
    assert_eq!(ready.num_gpu_blocks, 32768);
    assert_eq!(
        (ready.block_size, ready.effective_attention_block_size, ready.cache_block_size()),
        (32, Some(32), 32)
    );
    assert_eq!((ready.max_num_seqs, ready.max_num_batched_tokens), (128, 2048));
    assert_eq!(ready.dtype, "float32");
    assert_eq!(ready.instance_id, "1795227489202125874");
    let events = KvEventsConfig {
        enable_kv_cache_events: true,
        publisher: "zmq".into(),
        endpoint: "tcp://*:25600".into(),
        replay_endpoint: Some("tcp://*:25700".into()),
        buffer_steps: 10_000,
        hwm: 100_000,
        max_queue_size: 100_000,
        topic: String::new(),
    };
    assert_eq!(ready.kv_events_config, Some(events));
    assert_eq!(EngineReady::decode(&ready.encode()).unwrap(), ready);
}

#[test]
fn encoded_ready_report_equals_captured_bytes() {
    let captured = frame("handshake/register_ready_response.f1.bin");
    let ready = EngineReady::decode(&captured).unwrap().encode();
    // vLLM writes this map as map16; the entries are the same.
    assert_eq!(ready[3..], captured[3..]);
}

#[test]
fn image_request_round_trips_byte_for_byte() {
    let frames = frames("add_image_aux_uint8/req-u8", 3);
    let add = add(&frames);
    assert_eq!(add.request_id, "req-u8");
    assert_eq!(*add.prompt_token_ids, image_prompt());
    assert_eq!(add.sampling_params.temperature, 0.0);
    assert_eq!(add.sampling_params.max_tokens, 4);
    assert_eq!(add.sampling_params.logprobs, Some(2));
    assert_eq!(add.arrival_time, 1795227549.4213014);
    let [feature] = &add.mm_features[..] else { panic!("one feature") };
    assert_eq!(
        (feature.modality.as_str(), feature.cache_key()),
        ("image", "a".repeat(64).as_str())
    );
    assert_eq!(feature.position, Placeholder { offset: 41, length: 80, is_embed: None });

    let item = feature.data.as_ref().unwrap();
    let pixels = item.get("pixel_values").unwrap();
    assert_eq!(
        pixels.kind,
        FieldKind::Flat { slices: vec![[Some(0), Some(320), None]], dim: 0, keep_on_cpu: false }
    );
    let tensor = pixels.tensor().unwrap();
    assert_eq!((&*tensor.dtype, &tensor.shape[..]), ("uint8", &[320, 1176][..]));
    assert_eq!(tensor.bytes().unwrap().as_ptr(), frames[2].as_ptr(), "the aux frame is not copied");
    let grid = item.get("image_grid_thw").unwrap();
    assert_eq!(grid.kind, FieldKind::Batched { keep_on_cpu: true });
    assert_eq!(grid.tensor().unwrap().shape, [3]);
    assert_eq!(grid.tensor().unwrap().integers().unwrap(), [1, 16, 20]);

    let encoded = request::encode(&add);
    assert_eq!(encoded, frames);
    assert_eq!(encoded[2].as_ptr(), frames[2].as_ptr(), "nor when it is sent");
}

#[test]
fn is_embed_mask_is_a_bool_tensor() {
    let mut frames = frames("add_image_aux_uint8/add_is_embed", 2);
    frames.push(frame("add_image_aux_uint8/req-u8.f2.bin"));
    let add = add(&frames);
    let position = &add.mm_features[0].position;
    assert_eq!((position.offset, position.length), (40, 82));
    let mask = position.is_embed.as_ref().unwrap();
    assert_eq!(mask.len(), 82);
    assert_eq!((mask[0], mask[1], mask[80], mask[81]), (false, true, true, false));
    assert_eq!(request::encode(&add), frames);
}

#[test]
fn aux_frames_are_numbered_from_one() {
    let mut frames = frames("add_image_aux_uint8/add_two_images", 2);
    frames.push(frame("add_image_aux_uint8/req-u8.f2.bin"));
    frames.push(frame("add_image_aux_uint8/add_two_images.f3.bin"));
    let add = add(&frames);
    let pixels = |i: usize| {
        add.mm_features[i].data.as_ref().unwrap().get("pixel_values").unwrap().tensor().unwrap()
    };
    assert_eq!(pixels(0).bytes().unwrap(), &frames[2]);
    assert_eq!(pixels(1).bytes().unwrap(), &frames[3]);
    assert_eq!(add.mm_features[1].position.offset, 166);
    assert_eq!(request::encode(&add), frames);
}

#[test]
fn cached_item_has_no_data() {
    for message in ["add_image_cached/add_data_none", "cache_miss/cache_miss_add"] {
        let frames = frames(message, 2);
        let add = add(&frames);
        assert_eq!(add.mm_features[0].data, None);
        assert_eq!(request::encode(&add), frames);
    }
}

#[test]
fn out_of_band_tensor_is_a_map() {
    let frames = frames("add_image_shm/add_shm_view", 2);
    let add = add(&frames);
    let pixels =
        add.mm_features[0].data.as_ref().unwrap().get("pixel_values").unwrap().tensor().unwrap();
    let TensorData::OutOfBand(map) = &pixels.data else { panic!("in the message") };
    assert_eq!(map["shm"], Value::from("proto-t5-1"));
    assert_eq!(map["nbytes"], Value::from(376_320));
    assert_eq!(pixels.nbytes(), Some(376_320));
    assert_eq!(request::encode(&add), frames);
}

#[test]
fn abort_has_request_ids() {
    let frames = frames("abort/abort_req", 2);
    assert_eq!(request::decode(&frames).unwrap(), ClientMessage::Abort(vec!["req-long".into()]));
    assert_eq!(request::encode_abort(&["req-long".into()]), frames);
}

#[test]
fn method_calls_have_arguments() {
    let call = utility("reset_prefix_cache_req");
    assert_eq!((call.call_id, call.method.as_str()), (3, "reset_prefix_cache"));
    assert_eq!(call.args, [Value::from(false), Value::from(false)]);
    for message in
        ["get_supported_tasks", "is_scheduler_paused", "reset_encoder_cache", "reset_mm_cache"]
    {
        let call = utility(&format!("{message}_req"));
        assert_eq!((call.method.as_str(), call.args.len()), (message, 0));
    }
    assert_eq!(utility("reset_prefix_cache_noargs_req").call_id, 9);
    assert_eq!(utility("unknown_method_req").method, "nope");
}

#[test]
fn method_results_are_values_or_failures() {
    let answer = |message: &str| {
        let frames = frames(&format!("utility/{message}_resp"), 1);
        let outputs = outputs(&frames);
        assert_eq!(output::encode(&outputs), frames, "{message} is encoded as vLLM does");
        outputs.utility_output.unwrap()
    };
    assert_eq!(answer("reset_mm_cache"), UtilityOutput { call_id: 2, result: Ok(Value::Nil) });
    assert_eq!(answer("reset_prefix_cache"), UtilityOutput { call_id: 3, result: Ok(true.into()) });
    assert_eq!(answer("reset_prefix_cache_noargs").result, Ok(true.into()));
    assert_eq!(answer("reset_encoder_cache").result, Ok(Value::Nil));
    assert_eq!(answer("get_supported_tasks").result, Ok(Value::Array(vec!["generate".into()])));
    assert_eq!(answer("is_scheduler_paused").result, Ok(false.into()));
    let failure = answer("unknown_method").result.unwrap_err();
    assert!(failure.0.contains("Call to nope method failed"), "{failure}");
}

#[test]
fn stream_of_outputs_decodes() {
    let stream: Vec<_> =
        (0..4).map(|i| outputs(&frames(&format!("outputs_stream/req-u8-{i}"), 1))).collect();
    let ids: Vec<_> =
        stream.iter().flat_map(|step| step.outputs[0].new_token_ids.clone()).collect();
    assert_eq!(ids, tokens([131, 304, 325, 137]));

    let first = &stream[0].outputs[0];
    let prefill = first.prefill_stats.as_ref().unwrap();
    assert_eq!(
        (prefill.num_prompt_tokens, prefill.num_cached_tokens, prefill.num_cache_creation_tokens),
        (125, 0, 96)
    );
    assert_eq!(first.events.iter().map(|event| event.kind).collect::<Vec<_>>(), [1, 2]);
    let logprobs = first.new_logprobs.as_ref().unwrap();
    assert_eq!((logprobs.len(), logprobs.width), (1, 3));
    let position = logprobs.positions().next().unwrap();
    assert_eq!(position.token_ids[0], TokenId(131));
    assert!(position.logprobs.iter().all(|&logprob| logprob < 0.0));
    assert_eq!(position.rank, 1);
    let stats = stream[0].scheduler_stats.as_ref().unwrap();
    assert_eq!((stats.num_running_reqs, stats.num_waiting_reqs), (1, 0));
    assert!(stats.kv_cache_usage > 0.0);
    assert_eq!((stats.prefix_cache_stats.requests, stats.prefix_cache_stats.queries), (1, 125));

    assert!(
        stream[1].outputs[0].prefill_stats.is_none()
            && stream[1].outputs[0].finish_reason.is_none()
    );
    assert_eq!(stream[3].outputs[0].finish_reason, Some(FinishReason::Length));
    assert_eq!(stream[3].weight_version.as_deref(), Some("default"));
}

#[test]
fn scheduler_stats_have_every_field_of_vllm() {
    let frames = frames("outputs_stream/req-u8-0", 1);
    let stats = |frame: &[u8]| {
        let outputs: Value = rmpv::decode::read_value(&mut &*frame).unwrap();
        let mut stats = outputs[2].as_map().unwrap().clone();
        stats.sort_by_key(|(name, _)| name.to_string());
        stats
    };
    assert_eq!(stats(&output::encode(&outputs(&frames))[0]), stats(&frames[0]));
}

#[test]
fn batch_has_outputs_of_several_requests() {
    let batch: Vec<_> =
        (0..7).map(|i| outputs(&frames(&format!("outputs_batch/b-{i}"), 1))).collect();
    assert!(batch[0].outputs.is_empty() && batch[0].scheduler_stats.is_some());
    let ends: Vec<_> = batch[1]
        .outputs
        .iter()
        .map(|output| {
            (output.request_id.as_str(), output.finish_reason, output.stop_reason.clone())
        })
        .collect();
    assert_eq!(
        ends,
        [
            ("s1", None, None),
            ("s2", Some(FinishReason::Stop), Some(StopReason::Token(TokenId(134)))),
            ("s3", Some(FinishReason::Stop), None),
        ]
    );
    assert_eq!(batch[6].outputs[0].finish_reason, Some(FinishReason::Length));
}

#[test]
fn large_logprobs_are_aux_frames() {
    let frames = frames("outputs_logprobs_aux/lp-1", 5);
    let outputs = outputs(&frames);
    let new = outputs.outputs[0].new_logprobs.as_ref().unwrap();
    assert_eq!((new.len(), new.width, new.ranks[0]), (1, 101, 1));
    assert_eq!((new.token_ids[0], new.token_ids[2]), (TokenId(0x86), TokenId(0x1b)));
    let prompt = outputs.outputs[0].prompt_logprobs.as_ref().unwrap();
    assert_eq!((prompt.len(), prompt.width), (3, 31));
    assert_eq!(prompt.ranks, [0x11f, 0x9d, 0x149]);
    let positions: Vec<_> = prompt.positions().collect();
    assert_eq!(positions.len(), 3);
    assert!(positions.iter().all(|position| position.token_ids.len() == 31));

    assert_eq!(output::encode(&outputs)[1..], frames[1..], "arrays are encoded as vLLM does");
    let last = self::outputs(&self::frames("outputs_logprobs_aux/lp-2", 3));
    assert_eq!(last.outputs[0].finish_reason, Some(FinishReason::Length));
    assert!(self::outputs(&self::frames("outputs_logprobs_aux/lp-0", 1)).outputs.is_empty());
}

#[test]
fn cache_miss_has_missing_items() {
    let captured = frames("cache_miss/cache_miss_output", 1);
    let miss = outputs(&captured);
    assert_eq!(miss.finished_requests, ["none-miss"]);
    assert_eq!(miss.outputs[0].finish_reason, Some(FinishReason::Error));
    assert_eq!(miss.outputs[0].mm_cache_miss_hashes, ["f".repeat(64)]);
    assert_eq!(output::encode(&miss), captured);

    let several = outputs(&frames("cache_miss/cache_miss_multi", 1));
    assert_eq!(several.outputs[0].mm_cache_miss_hashes, ["e".repeat(64), "d".repeat(64)]);
}

/// vLLM 0.33's encoder wrote the frame, which is the output of a paused engine.
#[test]
fn error_output_has_code_with_message() {
    let captured = frames("error/paused_0_33", 1);
    let outputs = outputs(&captured);
    let error = outputs.outputs[0].error.as_ref().unwrap();
    assert_eq!((error.code.as_str(), error.retryable), ("engine_paused", true));
    assert!(error.message.starts_with("Generation is paused."), "{error:?}");
    assert_eq!(output::encode(&outputs), captured);
}

#[test]
fn failed_preprocessing_ends_with_error() {
    let captured = frames("error/preproc_error_output", 1);
    let error = outputs(&captured);
    assert_eq!(error.outputs[0].finish_reason, Some(FinishReason::Error));
    assert!(error.outputs[0].mm_cache_miss_hashes.is_empty());
    assert_eq!(output::encode(&error), captured);
}

#[test]
fn aborted_request_has_no_output() {
    for message in ["abort/post_abort_1", "abort/post_abort_2"] {
        assert!(outputs(&frames(message, 1)).outputs.is_empty());
    }
}

#[test]
fn dead_message_decodes() {
    let frames = frames("engine_dead/engine_core_dead", 1);
    assert_eq!(output::decode(&frames).unwrap(), EngineMessage::Dead);
    assert_eq!(output::encode_dead(), frames);
}
