use super::*;

/// Encodes an output and decodes it into its compact form.
fn received(output: &EngineCoreOutput) -> ReceivedOutput {
    let outputs =
        EngineCoreOutputs { outputs: vec![output.clone()], ..EngineCoreOutputs::default() };
    match decode_compact(&encode(&outputs)).unwrap() {
        EngineMessage::Outputs(mut outputs) => outputs.outputs.remove(0),
        EngineMessage::Dead => panic!("dead"),
    }
}

#[test]
fn output_with_tokens_only_is_compact() {
    let tokens = EngineCoreOutput {
        request_id: "r".to_owned(),
        new_token_ids: vec![TokenId(7)],
        ..EngineCoreOutput::default()
    };
    let ReceivedOutput { request_id, payload } = received(&tokens);
    assert!(matches!(&payload, Payload::Tokens(tokens) if *tokens == [TokenId(7)]));
    assert_eq!(*payload.into_output(&request_id), tokens);
}

#[test]
fn output_with_other_fields_is_received_in_full() {
    let tokens = EngineCoreOutput { request_id: "r".to_owned(), ..EngineCoreOutput::default() };
    let error = Some(RequestError::default());
    for output in [
        EngineCoreOutput { finish_reason: Some(FinishReason::Stop), ..tokens.clone() },
        EngineCoreOutput { num_nans_in_logits: 1, ..tokens.clone() },
        EngineCoreOutput { mm_cache_miss_hashes: vec!["m".to_owned()], ..tokens.clone() },
        EngineCoreOutput { error, ..tokens.clone() },
    ] {
        let ReceivedOutput { request_id, payload } = received(&output);
        assert!(matches!(payload, Payload::Full(_)), "{output:?}");
        assert_eq!(*payload.into_output(&request_id), output);
    }
}

/// Encodes an output: a request id, a token, `known` fields at their defaults, and `appended`
/// fields.
fn output_with_appended(known: usize, appended: &[&[u8]]) -> Bytes {
    let mut output = vec![0xdc, 0, (2 + known + appended.len()) as u8];
    output.extend_from_slice(b"\xa1r\x91\x07");
    output.extend_from_slice(&EMPTY_REST[..known]);
    output.extend(appended.iter().copied().flatten());
    // EngineCoreOutputs with this output only.
    Bytes::from([b"\x92\x00\x91", &output[..]].concat())
}

fn is_compact(message: Bytes) -> bool {
    let Ok(EngineMessage::Outputs(outputs)) = decode_compact(&[message]) else {
        panic!("no outputs")
    };
    let [output] = &outputs.outputs[..] else { panic!("not one output") };
    assert_eq!(output.request_id, "r");
    matches!(&output.payload, Payload::Tokens(tokens) if *tokens == [TokenId(7)])
}

#[test]
fn appended_fields_keep_output_compact() {
    let known = EMPTY_REST.len();
    // 18 fields in 0.31, 19 in 0.33, 20 and more later.
    for message in [
        output_with_appended(known - 1, &[]),
        output_with_appended(known, &[]),
        output_with_appended(known, &[b"\xc0"]),
        output_with_appended(known, &[b"\x05"]),
        output_with_appended(known, &[b"\x81\xa1a\x92\x01\x02", b"\xc2", b"\xa3new"]),
    ] {
        assert!(is_compact(message.clone()), "{message:?}");
    }
    // A known field with a value.
    let mut finished = output_with_appended(known, &[b"\xc0"]).to_vec();
    finished[3 + 3 + 4 + 3] = 0;
    assert!(!is_compact(finished.into()));
    assert!(decode_compact(&[output_with_appended(known, &[b"\xa3ne"])]).is_err());
}
