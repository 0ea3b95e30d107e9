//! Hostile messages: the decoders accept or refuse any bytes without a panic, and reserve no memory
//! for more than the received bytes. Encoded messages round-trip.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use chiasm_engine::wire::stats::PrefixCacheStats;
use chiasm_engine::wire::{
    EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineMessage, EngineReady,
    FailureMessage, FinishReason, Hello, InitMessage, Logprobs, LoraRequest, MmFeature, MmField,
    MmItem, PrefillStats, Problem, RepetitionDetection, SamplingParams, SchedulerStats, StopReason,
    UtilityOutput, Value, WireTensor, output, request,
};
use chiasm_types::{Dtype, Placeholder, TokenId};
use proptest::prelude::*;

/// Runs every decoder on the message.
fn decode_all(frames: &[Bytes]) {
    let _ = output::decode(frames);
    let _ = request::decode(frames);
    for kind in [0, 1, 3] {
        let mut typed = vec![Bytes::copy_from_slice(&[kind])];
        typed.extend_from_slice(frames);
        let _ = request::decode(&typed);
    }
    if let Some(first) = frames.first() {
        let _ = Hello::decode(first);
        let _ = InitMessage::decode(first);
        let _ = EngineReady::decode(first);
    }
}

fn fixtures() -> Vec<Bytes> {
    fn collect(dir: &Path, files: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "bin") {
                files.push(path);
            }
        }
    }
    let mut files = Vec::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures"), &mut files);
    files.sort();
    let frames: Vec<Bytes> = files.iter().map(|path| std::fs::read(path).unwrap().into()).collect();
    // Frames of pixels have no msgpack.
    frames.into_iter().filter(|frame| frame.len() < 10_000).collect()
}

#[test]
fn truncated_fixtures_do_not_panic() {
    let fixtures = fixtures();
    assert!(fixtures.len() > 50);
    for frame in fixtures {
        for len in 0..frame.len() {
            decode_all(&[frame.slice(..len)]);
        }
    }
}

#[test]
fn length_past_message_is_refused() {
    // Array, map, string and extension with 2^32 − 1 elements, as the whole message and as its
    // first field.
    for marker in [0xdd_u8, 0xdf, 0xdb, 0xc9, 0xc6] {
        let mut claim = vec![marker, 0xff, 0xff, 0xff, 0xff];
        decode_all(&[claim.clone().into()]);
        let mut inside = vec![0x92];
        inside.append(&mut claim);
        decode_all(&[inside.into()]);
    }
    let tokens = [&[0x99, 0xa1, b'a', 0xdd, 0xff, 0xff, 0xff, 0xff][..], &[1; 100]].concat();
    let error = request::decode(&[Bytes::from_static(b"\0"), tokens.into()]).unwrap_err();
    assert_eq!((error.field, error.problem), ("prompt_token_ids", Problem::Truncated));
}

#[test]
fn deep_nesting_does_not_exhaust_the_stack() {
    let deep: Bytes = vec![0x91; 1_000_000].into();
    decode_all(std::slice::from_ref(&deep));
    // The nesting is once in a field that is skipped, once in one that is decoded.
    let skipped =
        [&[0x9a, 0x00, 0x90, 0xc0, 0x00, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0][..], &deep].concat();
    assert!(output::decode(&[skipped.into()]).is_err());
    let kept = [&[0x95, 0x00, 0x90, 0xc0, 0x00, 0x93, 0x01, 0xc0, 0x92, 0xc0][..], &deep].concat();
    assert_eq!(output::decode(&[kept.into()]).unwrap_err().problem, Problem::TooDeep);
}

#[test]
fn fields_of_later_version_are_skipped() {
    // EngineCoreOutputs of 10 fields around an EngineCoreOutput of 19; the added fields are maps.
    let mut output = vec![0xdc, 0, 19, 0xa1, b'a', 0x91, 7];
    output.extend([0xc0; 16]);
    output[7 + 11] = 0; // num_nans_in_logits
    output.extend([0x81, 0xa1, b'k', 0x92, 1, 2]);
    let message = [
        &[0x9a, 0, 0x91][..],
        &output,
        &[0xc0, 0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0x81, 0xa1, b'x', 0xc0],
    ];
    let decoded = output::decode(&[message.concat().into()]).unwrap();
    let EngineMessage::Outputs(outputs) = decoded else { panic!("not outputs") };
    assert_eq!(outputs.outputs[0].request_id, "a");
    assert_eq!(outputs.outputs[0].new_token_ids, [TokenId(7)]);
}

#[test]
fn keys_of_later_version_are_skipped() {
    let hello = b"\x83\xa6status\xa5HELLO\xa8new_keys\x92\x01\xc0\xa8headless\xc3";
    assert_eq!(Hello::decode(&Bytes::from_static(hello)).unwrap(), Hello::hello());
}

#[test]
fn missing_aux_frame_is_named() {
    let tensor = WireTensor::new(Dtype::U8, vec![300], vec![0; 300].into()).unwrap();
    let item = MmItem(vec![("pixel_values".into(), MmField::batched(tensor, false))]);
    let mut frames = request::encode(&with_item(item));
    assert_eq!(frames.len(), 3);
    frames.pop();
    let error = request::decode(&frames).unwrap_err();
    assert_eq!(error.problem, Problem::MissingFrame { index: 1, frames: 1 });
}

#[test]
fn tensor_size_mismatch_is_refused() {
    let tensor = WireTensor::new(Dtype::U8, vec![300], vec![0; 300].into()).unwrap();
    let item = MmItem(vec![("pixel_values".into(), MmField::batched(tensor, false))]);
    let mut frames = request::encode(&with_item(item));
    frames[2] = frames[2].slice(1..);
    assert!(matches!(
        request::decode(&frames).unwrap_err().problem,
        Problem::TensorSize { bytes: 299, .. }
    ));
}

#[test]
fn unimplemented_field_is_refused_by_name() {
    // pooling_params, at position 4
    let pooling = b"\x99\xa1a\x90\xc0\x80\x81\xa1k\x01\x00\xc0\xc0\xc0";
    let error =
        request::decode(&[Bytes::from_static(b"\0"), Bytes::from_static(pooling)]).unwrap_err();
    assert_eq!(error.field, "pooling_params");
    let error =
        request::decode(&[Bytes::from_static(b"\x09"), Bytes::from_static(b"\x90")]).unwrap_err();
    assert_eq!(error.field, "type");
}

fn with_item(item: MmItem) -> EngineCoreRequest {
    let feature = MmFeature {
        data: Some(item),
        modality: "image".into(),
        identifier: "h".into(),
        position: Placeholder { offset: 1, length: 2, is_embed: None },
        mm_hash: Some("h".into()),
    };
    EngineCoreRequest {
        request_id: "a".into(),
        mm_features: vec![feature],
        ..EngineCoreRequest::default()
    }
}

fn tokens() -> impl Strategy<Value = Vec<TokenId>> {
    proptest::collection::vec(any::<u32>().prop_map(TokenId), 0..40)
}

fn finite() -> impl Strategy<Value = f64> {
    -1e9..1e9
}

prop_compose! {
    fn sampling_params()(
        floats in [finite(), finite(), finite(), finite(), finite()],
        top_k in any::<i32>(),
        seed in any::<Option<i64>>(),
        lists in [tokens(), tokens(), tokens()],
        ignore_eos in any::<bool>(),
        counts in any::<[u32; 2]>(),
        logprobs in any::<[Option<i32>; 2]>(),
        eos in any::<Option<u32>>(),
        bias in proptest::collection::vec((any::<u32>().prop_map(TokenId), finite()), 0..4),
        skip_reading_prefix_cache in any::<Option<bool>>(),
    ) -> SamplingParams {
        let [stop_token_ids, all_stop_token_ids, allowed_token_ids] = lists;
        SamplingParams {
            presence_penalty: floats[0],
            repetition_penalty: floats[1],
            temperature: floats[2],
            top_p: floats[3],
            min_p: floats[4],
            top_k,
            seed,
            stop_token_ids,
            all_stop_token_ids,
            allowed_token_ids,
            ignore_eos,
            max_tokens: counts[0],
            min_tokens: counts[1],
            logprobs: logprobs[0],
            prompt_logprobs: logprobs[1],
            eos_token_id: eos.map(TokenId),
            logit_bias: bias,
            skip_reading_prefix_cache,
            thinking_token_budget: eos,
            repetition_detection: eos.map(|max_pattern_size| RepetitionDetection {
                max_pattern_size,
                ..RepetitionDetection::default()
            }),
            ..SamplingParams::default()
        }
    }
}

prop_compose! {
    fn feature()(
        rows in 0_usize..40,
        data in any::<bool>(),
        offset in any::<usize>(),
        mask in proptest::option::of(proptest::collection::vec(any::<bool>(), 0..600)),
        mm_hash in any::<Option<String>>(),
        identifier in any::<String>(),
    ) -> MmFeature {
        let pixels = Bytes::from(vec![7; rows * 24]);
        let pixels = WireTensor::new(Dtype::BF16, vec![rows, 12], pixels).unwrap();
        let scalar = WireTensor::new(Dtype::I64, vec![], vec![1; 8].into()).unwrap();
        let item = MmItem(vec![
            ("pixel_values".into(), MmField::flat(pixels, rows)),
            ("patches_per_image".into(), MmField::batched(scalar, true)),
        ]);
        MmFeature {
            data: data.then_some(item),
            modality: "image".into(),
            identifier,
            position: Placeholder { offset, length: rows, is_embed: mask },
            mm_hash,
        }
    }
}

prop_compose! {
    fn arbitrary_request()(
        request_id in any::<String>(),
        prompt_token_ids in tokens().prop_map(std::sync::Arc::new),
        mm_features in proptest::collection::vec(feature(), 0..4),
        sampling_params in sampling_params(),
        arrival_time in finite(),
        lora in proptest::option::of(("[a-z@]{1,9}", 1..=LoraRequest::MAX_ID, "/[a-z]{0,9}")),
        cache_salt in any::<Option<String>>(),
        (client_index, current_wave) in any::<(u32, i64)>(),
        priority in any::<i64>(),
        trace_headers in proptest::collection::vec(any::<(String, String)>(), 0..3),
        external_req_id in any::<Option<String>>(),
        reasoning_ended in any::<Option<bool>>(),
        reasoning_variables in proptest::collection::vec(any::<(String, bool)>(), 0..3),
    ) -> EngineCoreRequest {
        let lora_request =
            lora.map(|(name, id, path)| std::sync::Arc::new(LoraRequest { name, id, path }));
        EngineCoreRequest {
            request_id,
            prompt_token_ids,
            mm_features,
            sampling_params,
            arrival_time,
            lora_request,
            cache_salt,
            client_index,
            current_wave,
            priority,
            trace_headers,
            external_req_id,
            reasoning_ended,
            reasoning_variables,
        }
    }
}

fn logprobs() -> impl Strategy<Value = Option<Logprobs>> {
    let sizes = (0_usize..5, 1_usize..40);
    proptest::option::of(sizes.prop_flat_map(|(positions, width)| {
        let count = positions * width;
        (
            Just(width),
            proptest::collection::vec(0_u32..1 << 20, count),
            proptest::collection::vec(-1e3_f32..0.0, count),
            proptest::collection::vec(1_u32..1 << 20, positions),
        )
            .prop_map(|(width, ids, logprobs, ranks)| Logprobs {
                width,
                token_ids: ids.into_iter().map(TokenId).collect(),
                logprobs,
                ranks,
            })
    }))
}

prop_compose! {
    fn arbitrary_output()(
        request_id in any::<String>(),
        new_token_ids in tokens(),
        new_logprobs in logprobs(),
        prompt_logprobs in logprobs(),
        finish in proptest::option::of(0_u32..9),
        stop in proptest::option::of(prop_oneof![
            any::<u32>().prop_map(|token| StopReason::Token(TokenId(token))),
            any::<String>().prop_map(StopReason::Text),
        ]),
        cached in any::<Option<u64>>(),
        num_nans_in_logits in any::<u64>(),
        mm_cache_miss_hashes in proptest::collection::vec(any::<String>(), 0..3),
    ) -> EngineCoreOutput {
        let reasons = [
            FinishReason::Stop,
            FinishReason::Length,
            FinishReason::Abort,
            FinishReason::Error,
            FinishReason::Repetition,
        ];
        let reason =
            |code: u32| reasons.get(code as usize).copied().unwrap_or(FinishReason::Other(code));
        EngineCoreOutput {
            request_id,
            new_token_ids,
            new_logprobs,
            prompt_logprobs,
            num_nans_in_logits,
            mm_cache_miss_hashes,
            finish_reason: finish.map(reason),
            stop_reason: stop,
            prefill_stats: cached.map(|num_cached_tokens| PrefillStats {
                num_cached_tokens,
                ..PrefillStats::default()
            }),
            ..EngineCoreOutput::default()
        }
    }
}

prop_compose! {
    fn arbitrary_outputs()(
        engine_index in any::<u32>(),
        outputs in proptest::collection::vec(arbitrary_output(), 0..4),
        running in any::<Option<u64>>(),
        usage in 0.0..1.0,
        timestamp in finite(),
        utility in proptest::option::of((any::<u64>(), any::<Result<bool, String>>())),
        finished_requests in proptest::collection::vec(any::<String>(), 0..3),
        waves in any::<[Option<i64>; 2]>(),
        weight_version in any::<Option<String>>(),
    ) -> EngineCoreOutputs {
        EngineCoreOutputs {
            engine_index,
            outputs,
            timestamp,
            finished_requests,
            weight_version,
            scheduler_stats: running.map(|num_running_reqs| SchedulerStats {
                num_running_reqs,
                kv_cache_usage: usage,
                prefix_cache_stats: PrefixCacheStats {
                    hits: num_running_reqs,
                    ..PrefixCacheStats::default()
                },
                ..SchedulerStats::default()
            }),
            utility_output: utility.map(|(call_id, result)| UtilityOutput {
                call_id,
                result: result.map(Value::from).map_err(FailureMessage),
            }),
            wave_complete: waves[0],
            start_wave: waves[1],
        }
    }
}

proptest! {
    #[test]
    fn requests_round_trip(request in arbitrary_request()) {
        let decoded = request::decode(&request::encode(&request)).unwrap();
        prop_assert_eq!(decoded, chiasm_engine::wire::ClientMessage::Add(Box::new(request)));
    }

    #[test]
    fn outputs_round_trip(outputs in arbitrary_outputs()) {
        let decoded = output::decode(&output::encode(&outputs)).unwrap();
        prop_assert_eq!(decoded, EngineMessage::Outputs(outputs));
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(
        frames in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..4),
    ) {
        let frames: Vec<Bytes> = frames.into_iter().map(Bytes::from).collect();
        decode_all(&frames);
    }

    #[test]
    fn changed_fixtures_do_not_panic(
        pick in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        thread_local!(static FIXTURES: Vec<Bytes> = fixtures());
        let mut frame = FIXTURES.with(|fixtures| pick.get(fixtures).to_vec());
        if !frame.is_empty() {
            for (at, byte) in changes {
                *at.get_mut(&mut frame) = byte;
            }
        }
        decode_all(&[frame.into()]);
    }
}
