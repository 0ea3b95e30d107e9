//! Formats × APIs × cuts: a stream has the content of the whole answer, in the same order, and
//! follows its API's grammar.

use std::sync::Arc;

use chiasm_backend::RequestId;
use chiasm_parse::CallEnd;
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::test_support::{TestOutputParsing, model, whole};
use chiasm_request::{ChoiceDelta, FinishedChoice, ToolChoice, ToolUse};
use serde_json::{Value, json};

use crate::anthropic::in_tests as messages;
use crate::event_grammar::{self, ParsedAnswer, Piece};
use crate::openai::ReasoningFields;
use crate::openai::{AnswerHead, Usage, chat};
use crate::responses::in_tests::Responses;

fn function(name: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

/// A sample of a format: how it writes reasoning and two calls.
struct FormatSample {
    tools: &'static str,
    reasoning: &'static str,
    think: [&'static str; 2],
    /// The markers before the first call, between two calls and after the last call.
    around: [&'static str; 3],
    calls: [&'static str; 2],
}

const HERMES: FormatSample = FormatSample {
    tools: "hermes",
    reasoning: "qwen3",
    think: ["<think>", "</think>\n\n"],
    around: ["", "\n", ""],
    calls: [
        "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"Zürich\", \"days\": 3}}\n\
         </tool_call>",
        "<tool_call>\n{\"name\": \"write\", \"arguments\": {\"text\": \"} <b> \\\" \\n\"}}\n\
         </tool_call>",
    ],
};

const FORMATS: [FormatSample; 9] = [
    HERMES,
    FormatSample {
        tools: "qwen3_coder",
        calls: [
            "<tool_call>\n<function=look>\n<parameter=city>\nZürich\n</parameter>\n\
             <parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=write>\n<parameter=text>\na <b> } \"\n</parameter>\n\
             </function>\n</tool_call>",
        ],
        ..HERMES
    },
    FormatSample {
        tools: "glm45",
        reasoning: "glm45",
        calls: [
            "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
            "<tool_call>write\n<arg_key>text</arg_key>\n\
             <arg_value>a <b> }</arg_value>\n</tool_call>",
        ],
        ..HERMES
    },
    FormatSample {
        tools: "gemma4",
        reasoning: "gemma4",
        think: ["<|channel>thought\n", "<channel|>"],
        around: ["", "", ""],
        calls: [
            "<|tool_call>call:look{city:<|\"|>Zürich<|\"|>,days:3}<tool_call|>",
            "<|tool_call>call:write{text:<|\"|>a } b<|\"|>}<tool_call|>",
        ],
    },
    FormatSample {
        tools: "mistral",
        reasoning: "mistral",
        think: ["[THINK]", "[/THINK]"],
        around: ["", "", ""],
        calls: [
            "[TOOL_CALLS]look[ARGS]{\"city\": \"Zürich\"}",
            "[TOOL_CALLS]write[ARGS]{\"text\": \"} ]\"}",
        ],
    },
    FormatSample {
        tools: "deepseek_v3",
        reasoning: "deepseek_r1",
        think: ["<think>\n", "</think>\n"],
        around: ["<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"],
        calls: [
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n\
             ```json\n{\"city\": \"Zürich\"}\n```<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n\
             ```json\n{\"text\": \"} `\"}\n```<｜tool▁call▁end｜>",
        ],
    },
    FormatSample {
        tools: "kimi_k2",
        reasoning: "kimi_k2",
        think: ["<think>", "</think>"],
        around: ["<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"],
        calls: [
            "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>\
             {\"city\": \"Zürich\"}<|tool_call_end|>",
            "<|tool_call_begin|>functions.write:1<|tool_call_argument_begin|>\
             {\"text\": \"}\"}<|tool_call_end|>",
        ],
    },
    FormatSample {
        tools: "minimax_m2",
        reasoning: "minimax_m2",
        think: ["", "</think>\n\n"],
        around: ["<minimax:tool_call>\n", "", "</minimax:tool_call>"],
        calls: [
            "<invoke name=\"look\">\n<parameter name=\"city\">Zürich</parameter>\n</invoke>\n",
            "<invoke name=\"write\">\n<parameter name=\"text\">a <b> }</parameter>\n</invoke>\n",
        ],
    },
    FormatSample {
        tools: "llama4_pythonic",
        reasoning: "none",
        think: ["", ""],
        around: ["[", ", ", "]"],
        calls: ["look(city='Zürich', days=3)", "write(text='a ] )')"],
    },
];

impl FormatSample {
    fn reasoning_text(&self, text: &str) -> String {
        match self.reasoning {
            "none" => String::new(),
            _ => [self.think[0], text, self.think[1]].concat(),
        }
    }

    /// Returns answers that combine reasoning, text and calls in various orders.
    fn answers(&self) -> Vec<String> {
        let [open, between, close] = self.around;
        let [look, write] = self.calls;
        let both = [open, look, between, write, close].concat();
        let single = [open, look, close].concat();
        let half: String = look.chars().take(look.chars().count() * 2 / 3).collect();
        vec![
            self.reasoning_text("Ich denke.") + &both,
            self.reasoning_text("x") + "Let me look. " + &both,
            self.reasoning_text("y") + &single + "\nThat is all. 完了",
            self.reasoning_text("a")
                + &single
                + &self.reasoning_text("again")
                + open
                + write
                + close,
            // The model ends within a call.
            self.reasoning_text("b") + open + look + between + &half,
        ]
    }
}

/// Returns an answer in one piece, in pieces of several fixed sizes, and cut in two at each
/// character.
fn cuts(answer: &str) -> Vec<Vec<&str>> {
    let boundaries: Vec<usize> =
        answer.char_indices().map(|(at, _)| at).chain([answer.len()]).collect();
    let pieces = |size: usize| {
        let ends = boundaries.iter().skip(size).step_by(size).copied().chain([answer.len()]);
        ends.scan(0, |from, to| Some(&answer[std::mem::replace(from, to)..to])).collect()
    };
    let in_two = boundaries.iter().map(|&at| vec![&answer[..at], &answer[at..]]);
    [answer.len(), 1, 2, 3, 7, 20].map(pieces).into_iter().chain(in_two).collect()
}

/// Writes chat answers of one model.
struct Chats {
    head: AnswerHead,
    model: Arc<ServedModel>,
}

impl Chats {
    fn streamed(&self, deltas: &[ChoiceDelta]) -> ParsedAnswer {
        let fields = ReasoningFields::default();
        let chunks = chat::Chunks::new(&self.head, self.model.tokenizer.clone(), fields, false);
        let mut stream = Vec::new();
        chunks.write_role(&mut stream, 0, None, None);
        deltas.iter().for_each(|delta| chunks.write_delta(&mut stream, delta, None, None));
        stream.extend_from_slice(crate::sse::DONE);
        event_grammar::chat(str::from_utf8(&stream).unwrap()).remove(0)
    }

    fn whole(&self, choice: &FinishedChoice) -> ParsedAnswer {
        let options =
            chat::AnswerOptions { fields: ReasoningFields::default(), prompt_tokens: None };
        let choices = std::slice::from_ref(choice);
        let answer = chat::answer(
            &self.head,
            &self.model.tokenizer,
            choices,
            options,
            Usage::default(),
            None,
        );
        event_grammar::whole_chat(&serde_json::to_value(answer).unwrap())
    }
}

/// Returns the pieces without the parts of calls that differ between the APIs.
fn comparable_pieces(answer: &ParsedAnswer) -> Vec<Piece> {
    let mut pieces = answer.pieces.clone();
    for piece in &mut pieces {
        if let Piece::Call(call) = piece {
            call.status.clear();
            call.arguments = serde_json::from_str(&call.arguments)
                .unwrap_or(Value::Object(Default::default()))
                .to_string();
        }
    }
    pieces
}

#[tokio::test]
async fn streams_equal_whole_answers_at_every_cut() {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "text": {"type": "string"},
    }});
    let tools = ToolUse {
        tools: Arc::new(json!([
            function("look", parameters.clone()),
            function("write", parameters)
        ])),
        choice: ToolChoice::Auto,
        allowed: None,
        enforced: Default::default(),
        in_parallel: true,
    };
    let responses = Responses::new().await;
    let mut unfinished = 0;
    for format in FORMATS {
        let model = model(format.tools, format.reasoning);
        let parsing = TestOutputParsing::new(model.clone(), &tools);
        let head = AnswerHead::new("chatcmpl", &RequestId::new("r").unwrap(), "m");
        let chats = Chats { head, model: model.clone() };
        for answer in format.answers() {
            let at_once = whole(parsing.parse(&[&answer]));
            let in_chat = chats.whole(&at_once);
            let in_messages = messages::whole(&at_once);
            let in_responses = responses.whole(&at_once);
            let last_call = at_once.events.calls().last().map(|call| call.end);
            unfinished += usize::from(last_call == Some(CallEnd::Unfinished));
            let ends = match last_call {
                Some(CallEnd::Closed) => ["tool_calls", "tool_use", "completed"],
                Some(CallEnd::Unfinished) => ["stop", "end_turn", "incomplete"],
                None => ["stop", "end_turn", "completed"],
            };
            let seen = [&in_chat, &in_messages, &in_responses].map(|parsed| parsed.end.as_deref());
            assert_eq!(seen, ends.map(Some), "{} {answer}", format.tools);
            for pieces in cuts(&answer) {
                let deltas = parsing.parse(&pieces);
                let context = format!("{} {pieces:?}", format.tools);
                let chat = chats.streamed(&deltas);
                assert_eq!(chat.unordered(), in_chat, "{context}");
                assert_eq!(messages::streamed(&deltas), in_messages, "{context}");
                assert_eq!(responses.streamed(&deltas), in_responses, "{context}");
                assert_eq!(comparable_pieces(&chat), comparable_pieces(&in_messages), "{context}");
                assert_eq!(comparable_pieces(&chat), comparable_pieces(&in_responses), "{context}");
            }
        }
    }
    assert!(unfinished >= 5, "at least five formats report the unfinished call: {unfinished}");
}
