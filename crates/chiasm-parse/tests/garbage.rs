//! Random answers: parsers don't panic and take linear time, and piece boundaries don't matter.

use std::sync::Arc;
use std::time::Duration;

use chiasm_parse::{Collected, Format, Parser, Start, Tools, reasoning_parsers, tool_parsers};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

/// Returns formats that cover each parser. All pairs of parsers would be too many.
fn formats() -> Vec<(String, Format)> {
    let tools: Vec<_> = tool_parsers().collect();
    let reasoning: Vec<_> = reasoning_parsers().collect();
    let pairs = tools
        .iter()
        .enumerate()
        .map(|(i, tool)| (Some(*tool), (i % 2 == 0).then(|| reasoning[i % reasoning.len()])));
    let alone = reasoning.iter().map(|reasoning| (None, Some(*reasoning)));
    let format = |(tool, reasoning)| {
        (format!("{tool:?} {reasoning:?}"), Format::new(tool, reasoning).unwrap())
    };
    let listed = Format::new(None, Some("qwen3")).unwrap().with_listed_calls();
    pairs.chain(alone).map(format).chain([("listed".to_owned(), listed)]).collect()
}

fn tools() -> Arc<Tools> {
    let parameters = json!({"properties": {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"type": "object"},
    }});
    Tools::new([("f", &parameters)]).into()
}

/// Typical pieces of answers, to which the tests add the markers of a format.
const PIECES: [&str; 40] = [
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "\"",
    "'",
    ":",
    ",",
    "=",
    "\\",
    ";",
    "/",
    "<",
    ">",
    "é",
    "\n",
    " ",
    "f",
    "a",
    "n",
    "1",
    "-2.5",
    "true",
    "null",
    "name",
    "\"name\": \"f\"",
    "\"arguments\": {\"a\": ",
    "\"parameters\": ",
    "functions.f:0",
    "call:f",
    "\"n\"",
    "string=\"true\"",
    "\u{1f600}",
    "text",
    "</",
    "f(a=1)",
    "\n```json\n",
    "{\"name\": \"f\", \"arguments\": {}}",
];

fn pieces(format: &Format) -> impl Strategy<Value = Vec<&'static str>> + use<> {
    let markers = format.markers();
    // Markers are listed twice, so that they are frequent.
    let all: Vec<&str> = PIECES
        .iter()
        .copied()
        .chain(markers.iter().copied())
        .chain(markers.iter().copied())
        .collect();
    vec(select(all), 0..40)
}

fn read<'a>(format: &Format, pieces: impl IntoIterator<Item = &'a str>) -> Collected {
    let mut answer = Collected::default();
    let mut parser = Parser::new(format, tools(), format.start(None));
    pieces.into_iter().for_each(|piece| parser.push(piece, &mut answer));
    parser.finish(&mut answer);
    answer
}

#[test]
fn piece_boundaries_do_not_change_result() {
    for (name, format) in formats() {
        // `PROPTEST_CASES` raises the number of cases.
        let config = ProptestConfig::default();
        let config =
            ProptestConfig { cases: config.cases.max(300), failure_persistence: None, ..config };
        let mut runner = proptest::test_runner::TestRunner::new(config);
        let strategy = (pieces(&format), vec(any::<prop::sample::Index>(), 0..6));
        let outcome = runner.run(&strategy, |(pieces, cuts)| {
            let text = pieces.concat();
            let whole = read(&format, [text.as_str()]);
            prop_assert_eq!(&read(&format, pieces.iter().copied()), &whole);
            prop_assert_eq!(&read(&format, text.split_inclusive(|_| true)), &whole);
            let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            let mut cuts: Vec<usize> =
                cuts.iter().filter(|_| !places.is_empty()).map(|cut| *cut.get(&places)).collect();
            cuts.sort_unstable();
            let ends = cuts.iter().copied().chain([text.len()]);
            let cut: Vec<&str> =
                ends.scan(0, |from, to| Some(&text[std::mem::replace(from, to)..to])).collect();
            prop_assert_eq!(&read(&format, cut), &whole);
            Ok(())
        });
        if let Err(error) = outcome {
            panic!("{name}: {error}");
        }
    }
}

#[test]
fn white_space_after_nameless_call_is_dropped() {
    let format = Format::new(Some("mistral"), None).unwrap();
    let pieces = ["[TOOL_CALLS]", "\n", "[ARGS]", "(", "\n", "text"];
    for answer in [read(&format, pieces), read(&format, [pieces.concat().as_str()])] {
        // A call without a name is dropped.
        assert_eq!((answer.text.as_str(), answer.calls.len()), ("text", 0));
    }
}

#[test]
fn text_without_calls_is_kept_whole() {
    for (name, format) in formats() {
        let mut answer = Collected::default();
        let mut parser = Parser::new(&format, tools(), Start::NoReasoning);
        let text = "Plain text, é and 1 < 2 > 0: \n a & b \n";
        text.split_inclusive(' ').for_each(|piece| parser.push(piece, &mut answer));
        parser.finish(&mut answer);
        let begin = if name.contains("append_think") { "<think>" } else { "" };
        assert_eq!((answer.text, answer.calls.len()), (format!("{begin}{text}"), 0), "{name}");
    }
}

#[test]
fn too_deep_arguments_end_at_depth_limit() {
    let text = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {}", "{\"a\": ".repeat(300));
    let format = Format::new(Some("hermes"), None).unwrap();
    let whole = read(&format, [text.as_str()]);
    assert_eq!(whole.calls[0].arguments, "{\"a\": ".repeat(256));
    assert_eq!(read(&format, text.split_inclusive(' ')), whole);
}

/// Returns the CPU time of this thread. Unlike wall-clock time, it does not grow while other
/// threads run.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

/// Returns the CPU time to parse an answer that repeats a piece, four characters at a time. It is
/// the minimum of three runs.
fn parse_time(format: &Format, begin: &str, piece: &str, times: usize) -> Duration {
    let text = format!("{begin}{}", piece.repeat(times));
    let characters: Vec<char> = text.chars().collect();
    let tokens: Vec<String> = characters.chunks(4).map(|token| token.iter().collect()).collect();
    let once = || {
        let start = cpu_time();
        read(format, tokens.iter().map(String::as_str));
        cpu_time() - start
    };
    (0..3).map(|_| once()).min().unwrap_or_default()
}

#[test]
fn cpu_time_is_linear_in_answer_length() {
    let repeated = [
        ("", "word "),
        ("", "\n"),
        ("", "<"),
        ("", "{"),
        ("", "{\"a\": "),
        ("", "[f("),
        ("", "[1, "),
        ("", "<tool_call>"),
        ("<tool_call>\n", " "),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"", "\\\" "),
        ("<tool_call>{\"arguments\": {\"a\": \"", "x "),
        ("<tool_call>{", "\"b\": 1, "),
        ("<tool_call>\n<function=f>\n<parameter=a>", "x\n"),
        ("<tool_call>\n<function=f>\n<parameter=o>", "[1, "),
        ("<|tool_call>call:f{a:<|\"|>", "x,"),
        ("<|tool_call>call:f{a:", "[["),
        ("[f(a=", "["),
        ("[f(a='", "x'"),
        ("<think>", "x <"),
        ("[TOOL_CALLS]", "f"),
        ("[TOOL_CALLS][", " "),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0\
             <|tool_call_argument_begin|>",
            " { ",
        ),
    ];
    for (name, format) in formats() {
        for (begin, piece) in repeated {
            // 100,000 tokens of four characters, and a quarter of this number.
            let times = 400_000 / piece.chars().count();
            let quarter = parse_time(&format, begin, piece, times / 4);
            let whole = parse_time(&format, begin, piece, times);
            // Quadratic time would be 16 times as long.
            let limit = quarter * 9 + Duration::from_millis(20);
            assert!(
                whole <= limit,
                "{name}: {piece:?} after {begin:?} takes {whole:?}, a quarter of it {quarter:?}"
            );
        }
    }
}
