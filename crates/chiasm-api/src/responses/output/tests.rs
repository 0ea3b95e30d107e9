use chiasm_media::ByteBudget;
use chiasm_pipeline::test_support::TestPipeline;
use chiasm_request::AnswerEvents;
use serde_json::{Value, json};

use super::*;
use crate::openai::fields::Fields;
use crate::responses::response::Echo;

pub(crate) async fn head() -> Head {
    let test = TestPipeline::new(1).await;
    let body = json!({"tools": [{"type": "function", "name": "f"}], "instructions": "be short"});
    let echo = Echo::from_fields(&Fields::new(body, "").unwrap()).unwrap();
    let request = chiasm_backend::RequestId::new("r").unwrap();
    let sampling = chiasm_request::ClientSampling { temperature: Some(0.5), ..Default::default() };
    Head::new(
        &request,
        "m",
        &test.pipeline.model.generation,
        &sampling,
        echo,
        ByteBudget::new(1 << 20).empty_charge(),
    )
    .unwrap()
}

/// Returns the names of a custom tool, and of a function and a custom tool in a namespace.
fn tool_names() -> ToolNames {
    let custom = json!({"type": "custom", "name": "sh"});
    let within = json!([{"type": "function", "name": "f"}, custom]);
    let tools = json!([custom, {"type": "namespace", "name": "n", "tools": within}]);
    crate::responses::tools::take(&mut Fields::new(json!({"tools": tools}), "").unwrap()).unwrap().1
}

/// Returns calls of the tools of [`tool_names`], in pieces.
fn client_tool_calls(finish: Finish) -> Vec<ChoiceDelta> {
    vec![
        delta([call_piece(0, Some(("a", "sh")), "")]),
        delta([call_piece(0, None, r#"{"input": "ls"#)]),
        delta([call_piece(0, None, r#" -l\"#)]),
        delta([
            call_piece(0, None, r#"n"}"#),
            closed(),
            call_piece(1, Some(("b", "n__f")), "{}"),
            closed(),
        ]),
        delta([call_piece(2, Some(("c", "n__sh")), r#"{"cmd": 1}"#), closed()]),
        end(finish),
    ]
}

fn usage() -> Usage {
    Usage {
        prompt_tokens: 5,
        completion_tokens: 7,
        cached_tokens: 3,
        created_tokens: Some(2),
        reasoning_tokens: Some(2),
        ..Usage::default()
    }
}

fn delta(events: impl IntoIterator<Item = AnswerEvent>) -> ChoiceDelta {
    let mut delta = ChoiceDelta::default();
    events.into_iter().for_each(|event| delta.events.push(event));
    delta
}

fn end(finish: Finish) -> ChoiceDelta {
    ChoiceDelta { finish: Some(finish), ..ChoiceDelta::default() }
}

fn text(text: &str) -> AnswerEvent {
    AnswerEvent::Text(text.to_owned())
}

fn reasoning(text: &str) -> AnswerEvent {
    AnswerEvent::Reasoning(text.to_owned())
}

fn call_piece(index: usize, begin: Option<(&str, &str)>, arguments: &str) -> AnswerEvent {
    let (id, name) = begin.map(|(id, name)| (id.to_owned(), name.to_owned())).unzip();
    AnswerEvent::Call(ToolCallDelta { index, id, name, arguments: arguments.to_owned() })
}

fn closed() -> AnswerEvent {
    AnswerEvent::EndCall(CallEnd::Closed)
}

fn unfinished() -> AnswerEvent {
    AnswerEvent::EndCall(CallEnd::Unfinished)
}

/// Returns reasoning, text and two calls, in pieces. Some deltas have several kinds of content,
/// some have none.
fn deltas(finish: Finish, last: AnswerEvent) -> Vec<ChoiceDelta> {
    vec![
        delta([reasoning("let me ")]),
        delta([]),
        delta([reasoning("think"), text("I ")]),
        delta([text("call"), call_piece(0, Some(("a", "f")), "")]),
        delta([call_piece(0, None, r#"{"x":"#)]),
        delta([call_piece(0, None, "1}"), closed(), call_piece(1, Some(("b", "g")), "{")]),
        ChoiceDelta { finish: Some(finish), ..delta([call_piece(1, None, "}"), last]) },
    ]
}

fn output(last: &str) -> Value {
    json!([
        {"type": "reasoning", "id": "rs_r_0", "summary": [], "status": "completed",
         "content": [{"type": "reasoning_text", "text": "let me think"}]},
        {"type": "message", "id": "msg_r_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I call", "annotations": [], "logprobs": []}]},
        {
            "type": "function_call",
            "id": "fc_r_2",
            "call_id": "a",
            "name": "f",
            "arguments": r#"{"x":1}"#,
            "status": "completed",
        },
        {
            "type": "function_call",
            "id": "fc_r_3",
            "call_id": "b",
            "name": "g",
            "arguments": "{}",
            "status": last,
        },
    ])
}

fn events(bytes: &[Bytes]) -> Vec<Value> {
    let text = String::from_utf8(bytes.concat()).unwrap();
    let read = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name, format!("event: {}", data["type"].as_str().unwrap()));
        data
    };
    text.split_terminator("\n\n").map(read).collect()
}

fn streamed(head: &Head, finish: Finish, last: AnswerEvent) -> Vec<Value> {
    stream_events(head, ToolNames::default(), deltas(finish, last))
}

fn stream_events(head: &Head, names: ToolNames, deltas: Vec<ChoiceDelta>) -> Vec<Value> {
    let (mut answer, first_events) = Answer::streamed("r", names, None, head);
    let mut all = first_events.to_vec();
    for delta in deltas {
        answer.add(&delta);
        if delta.finish.is_some() {
            answer.end(head, usage());
        }
        all.extend(answer.take_events());
    }
    events(&all)
}

#[tokio::test]
async fn whole_response_has_items_with_echoed_fields() {
    let head = head().await;
    let mut events = AnswerEvents::default();
    deltas(Finish::ToolCalls, closed()).into_iter().for_each(|delta| events.append(delta.events));
    let choice = FinishedChoice {
        events,
        reasoning_tokens: 2,
        tokens: Vec::new(),
        logprobs: None,
        text_logprobs: Vec::new(),
        prompt_logprobs: None,
        finish: Finish::ToolCalls,
    };
    let answer = Answer::whole("r", ToolNames::default(), None, choice);
    let response = serde_json::to_value(answer.response(&head, usage())).unwrap();
    assert_eq!(response["output"], output("completed"));
    for (field, value) in [
        ("id", json!("resp_r")),
        ("object", json!("response")),
        ("status", json!("completed")),
        ("model", json!("m")),
        ("error", Value::Null),
        ("incomplete_details", Value::Null),
        ("instructions", json!("be short")),
        (
            "tools",
            json!([{
                "type": "function",
                "name": "f",
                "description": null,
                "parameters": null,
                "strict": null,
            }]),
        ),
        ("tool_choice", json!("auto")),
        ("parallel_tool_calls", json!(true)),
        ("temperature", json!(0.5)),
        ("text", json!({"format": {"type": "text"}})),
        ("store", json!(false)),
    ] {
        assert_eq!(response[field], value, "{field}");
    }
    let expected = json!({
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 2},
        "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 12,
    });
    assert_eq!(response["usage"], expected);
}

#[tokio::test]
async fn stream_has_events_for_each_item() {
    let events = streamed(&head().await, Finish::ToolCalls, closed());
    let numbers: Vec<_> =
        events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let short = |event: &Value| {
        let kind = event["type"].as_str().unwrap().trim_start_matches("response.").to_owned();
        (kind, event["output_index"].as_u64())
    };
    let kinds: Vec<_> = events.iter().map(short).collect();
    let expected = [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", Some(0)),
        ("content_part.added", Some(0)),
        ("reasoning_text.delta", Some(0)),
        ("reasoning_text.delta", Some(0)),
        ("reasoning_text.done", Some(0)),
        ("content_part.done", Some(0)),
        ("output_item.done", Some(0)),
        ("output_item.added", Some(1)),
        ("content_part.added", Some(1)),
        ("output_text.delta", Some(1)),
        ("output_text.delta", Some(1)),
        ("output_text.done", Some(1)),
        ("content_part.done", Some(1)),
        ("output_item.done", Some(1)),
        ("output_item.added", Some(2)),
        ("function_call_arguments.delta", Some(2)),
        ("function_call_arguments.delta", Some(2)),
        ("function_call_arguments.done", Some(2)),
        ("output_item.done", Some(2)),
        ("output_item.added", Some(3)),
        ("function_call_arguments.delta", Some(3)),
        ("function_call_arguments.delta", Some(3)),
        ("function_call_arguments.done", Some(3)),
        ("output_item.done", Some(3)),
        ("completed", None),
    ];
    assert_eq!(kinds, expected.map(|(kind, index)| (kind.to_owned(), index)));
    assert_eq!(
        (&events[0]["response"]["status"], &events[0]["response"]["output"]),
        (&json!("in_progress"), &json!([]))
    );
    let started = json!({
        "type": "message",
        "id": "msg_r_1",
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    });
    assert_eq!(events[9]["item"], started);
    let delta = json!({
        "type": "response.output_text.delta",
        "sequence_number": 11,
        "output_index": 1,
        "item_id": "msg_r_1",
        "content_index": 0,
        "delta": "I ",
        "logprobs": [],
    });
    assert_eq!(events[11], delta);
    assert_eq!(events[13]["text"], "I call");
    let done = json!({
        "type": "response.function_call_arguments.done",
        "sequence_number": 19,
        "output_index": 2,
        "item_id": "fc_r_2",
        "name": "f",
        "arguments": r#"{"x":1}"#,
    });
    assert_eq!(events[19], done);
    let ended: Vec<_> =
        events.iter().filter(|event| event["type"] == "response.output_item.done").collect();
    assert_eq!(
        ended.iter().map(|event| event["item"].clone()).collect::<Value>(),
        output("completed")
    );
    let last = &events.last().unwrap()["response"];
    assert_eq!((&last["output"], &last["status"]), (&output("completed"), &json!("completed")));
    assert_eq!(last["usage"]["total_tokens"], 12);
}

#[tokio::test]
async fn cut_answer_has_incomplete_last_call() {
    let cut = json!({"reason": "max_output_tokens"});
    for (finish, details) in [(Finish::Length, cut), (Finish::Eos, Value::Null)] {
        let events = streamed(&head().await, finish, unfinished());
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.incomplete");
        assert_eq!(last["response"]["status"], "incomplete");
        assert_eq!(last["response"]["incomplete_details"], details);
        assert_eq!(last["response"]["output"], output("incomplete"));
    }
}

#[tokio::test]
async fn call_that_was_closed_before_the_cut_is_completed() {
    let events = streamed(&head().await, Finish::Length, closed());
    let response = &events.last().unwrap()["response"];
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["output"], output("completed"));
}

#[tokio::test]
async fn delta_across_items_keeps_event_order() {
    let deltas = vec![
        delta([call_piece(0, Some(("a", "f")), "{")]),
        delta([call_piece(0, None, "}"), closed(), reasoning("hm"), text("so")]),
        delta([text(" far"), call_piece(1, Some(("b", "g")), "{}"), closed()]),
        end(Finish::ToolCalls),
    ];
    let events = stream_events(&head().await, ToolNames::default(), deltas);
    let output = &events.last().unwrap()["response"]["output"];
    let kinds: Vec<_> = output.as_array().unwrap().iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["function_call", "reasoning", "message", "function_call"]);
    assert_eq!((&output[0]["arguments"], &output[3]["arguments"]), (&json!("{}"), &json!("{}")));
    assert_eq!(output[2]["content"][0]["text"], "so far");
}

#[tokio::test]
async fn error_ends_open_item_with_failed_response() {
    let head = head().await;
    let (mut answer, _) = Answer::streamed("r", ToolNames::default(), None, &head);
    answer.add(&delta([text("half")]));
    answer.take_events();
    answer.fail(&head, &ApiError::internal("the engine died"));
    let events = events(&[answer.take_events().unwrap()]);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    let response = &last["response"];
    assert_eq!(response["status"], "failed");
    assert_eq!(response["error"], json!({"code": "server_error", "message": "the engine died"}));
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert_eq!(answer.take_events(), None);
}

#[tokio::test]
async fn empty_answer_has_no_items() {
    let head = head().await;
    let (mut answer, _) = Answer::streamed("r", ToolNames::default(), None, &head);
    answer.add(&end(Finish::Eos));
    assert_eq!(answer.take_events(), None);
    answer.end(&head, usage());
    let events = events(&[answer.take_events().unwrap()]);
    assert_eq!((events.len(), &events[0]["response"]["output"]), (1, &json!([])));
}

#[tokio::test]
async fn calls_have_client_names_of_tools() {
    let head = head().await;
    let calls = json!([
        {
            "type": "custom_tool_call",
            "id": "ctc_r_0",
            "call_id": "a",
            "name": "sh",
            "input": "ls -l\n",
            "status": "completed",
        },
        {
            "type": "function_call",
            "id": "fc_r_1",
            "call_id": "b",
            "name": "f",
            "namespace": "n",
            "arguments": "{}",
            "status": "completed",
        },
        {
            "type": "custom_tool_call",
            "id": "ctc_r_2",
            "call_id": "c",
            "name": "sh",
            "namespace": "n",
            "input": r#"{"cmd": 1}"#,
            "status": "completed",
        },
    ]);
    let events = stream_events(&head, tool_names(), client_tool_calls(Finish::ToolCalls));
    let values = |index: u64, kind: &str, field: &str| -> Vec<Value> {
        events
            .iter()
            .filter(|event| event["output_index"] == index && event["type"] == kind)
            .map(|event| event[field].clone())
            .collect()
    };
    let input_delta = "response.custom_tool_call_input.delta";
    assert_eq!(values(0, input_delta, "delta"), ["ls", " -l", "\n"]);
    assert_eq!(values(0, input_delta, "item_id"), ["ctc_r_0", "ctc_r_0", "ctc_r_0"]);
    assert_eq!(values(0, "response.custom_tool_call_input.done", "input"), ["ls -l\n"]);
    assert_eq!(values(1, "response.function_call_arguments.delta", "delta"), ["{}"]);
    assert_eq!(values(2, input_delta, "delta"), [r#"{"cmd": 1}"#]);
    for index in 0..3 {
        let added = &values(index as u64, "response.output_item.added", "item")[0];
        assert_eq!(
            (&added["name"], &added["namespace"]),
            (&calls[index]["name"], &calls[index]["namespace"])
        );
        assert_eq!(added.get("input").or(added.get("arguments")), Some(&json!("")));
        assert_eq!(
            values(index as u64, "response.output_item.done", "item"),
            [calls[index].clone()]
        );
    }
    assert_eq!(events.last().unwrap()["response"]["output"], calls);

    let mut whole = Answer::new("r", tool_names(), Events::disabled());
    client_tool_calls(Finish::ToolCalls).iter().for_each(|delta| whole.add(delta));
    assert_eq!(serde_json::to_value(whole.response(&head, usage())).unwrap()["output"], calls);
}

#[tokio::test]
async fn truncated_custom_call_is_incomplete() {
    let mut cut = client_tool_calls(Finish::Length);
    cut.drain(2..5);
    cut.insert(2, delta([unfinished()]));
    let events = stream_events(&head().await, tool_names(), cut);
    assert!(
        !events.iter().any(|event| event["type"].as_str().unwrap().ends_with(".done")),
        "{events:?}"
    );
    let response = &events.last().unwrap()["response"];
    let item = &response["output"][0];
    assert_eq!(
        (&response["status"], &item["status"], &item["input"]),
        (&json!("incomplete"), &json!("incomplete"), &json!("ls"))
    );
}
