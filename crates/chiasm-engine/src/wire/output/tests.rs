use super::*;

/// What is received when an engine says this.
fn received(output: &EngineCoreOutput) -> ReceivedOutput {
    let outputs = EngineCoreOutputs { outputs: vec![output.clone()], ..EngineCoreOutputs::default() };
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
