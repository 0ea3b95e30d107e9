use super::*;

/// What is received when an engine says this.
fn received(output: &EngineCoreOutput) -> ReceivedOutput {
    let outputs =
        EngineCoreOutputs { outputs: vec![output.clone()], ..EngineCoreOutputs::default() };
    match receive(&encode(&outputs)).unwrap() {
        EngineMessage::Outputs(mut outputs) => outputs.outputs.remove(0),
        EngineMessage::Dead => panic!("dead"),
    }
}

#[test]
fn an_output_of_tokens_alone_is_received_without_room_for_the_rest() {
    let (request_id, new_token_ids) = ("r".to_owned(), vec![TokenId(7)]);
    let tokens = EngineCoreOutput { request_id, new_token_ids, ..EngineCoreOutput::default() };
    let ReceivedOutput { request_id, brought } = received(&tokens);
    assert!(matches!(&brought, Brought::Tokens(tokens) if *tokens == [TokenId(7)]));
    assert_eq!(*brought.into_output(&request_id), tokens);
}

#[test]
fn whatever_else_an_output_brings_is_received() {
    let tokens = EngineCoreOutput { request_id: "r".to_owned(), ..EngineCoreOutput::default() };
    let error = Some(RequestError::default());
    for output in [
        EngineCoreOutput { finish_reason: Some(FinishReason::Stop), ..tokens.clone() },
        EngineCoreOutput { num_nans_in_logits: 1, ..tokens.clone() },
        EngineCoreOutput { mm_cache_miss_hashes: vec!["m".to_owned()], ..tokens.clone() },
        EngineCoreOutput { error, ..tokens.clone() },
    ] {
        let ReceivedOutput { request_id, brought } = received(&output);
        assert!(matches!(brought, Brought::More(_)), "{output:?}");
        assert_eq!(*brought.into_output(&request_id), output);
    }
}

/// Encodes an output: a request id, a token, `known` fields at their defaults, and the appended
/// ones.
fn appended_to(known: usize, appended: &[&[u8]]) -> Bytes {
    let mut output = vec![0xdc, 0, (2 + known + appended.len()) as u8];
    output.extend_from_slice(b"\xa1r\x91\x07");
    output.extend_from_slice(&NOTHING_BESIDE_TOKENS[..known]);
    output.extend(appended.iter().copied().flatten());
    // EngineCoreOutputs of that output alone.
    Bytes::from([b"\x92\x00\x91", &output[..]].concat())
}

fn tokens_alone(message: Bytes) -> bool {
    let Ok(EngineMessage::Outputs(outputs)) = receive(&[message]) else { panic!("no outputs") };
    let [output] = &outputs.outputs[..] else { panic!("not one output") };
    assert_eq!(output.request_id, "r");
    matches!(&output.brought, Brought::Tokens(tokens) if *tokens == [TokenId(7)])
}

#[test]
fn fields_of_later_versions_leave_tokens_alone() {
    let known = NOTHING_BESIDE_TOKENS.len();
    // 18 fields in 0.31, 19 in 0.33, 20 and more later.
    for message in [
        appended_to(known - 1, &[]),
        appended_to(known, &[]),
        appended_to(known, &[b"\xc0"]),
        appended_to(known, &[b"\x05"]),
        appended_to(known, &[b"\x81\xa1a\x92\x01\x02", b"\xc2", b"\xa3new"]),
    ] {
        assert!(tokens_alone(message.clone()), "{message:?}");
    }
    // Something among the known fields.
    let mut finished = appended_to(known, &[b"\xc0"]).to_vec();
    finished[3 + 3 + 4 + 3] = 0;
    assert!(!tokens_alone(finished.into()));
    assert!(receive(&[appended_to(known, &[b"\xa3ne"])]).is_err());
}
