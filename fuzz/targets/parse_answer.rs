//! Parses answers in every format. The result must not depend on where the text is cut.
#![no_main]

use std::sync::{Arc, LazyLock};

use chiasm_parse::{Collected, Format, Parser, Start, Tools, reasoning_parsers, tool_parsers};
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use serde_json::json;

/// All pairs of a tool parser and a reasoning parser, each also with listed calls.
static FORMATS: LazyLock<Vec<Format>> = LazyLock::new(|| {
    let tools = || tool_parsers().map(Some).chain([None]);
    let reasoning = || reasoning_parsers().map(Some).chain([None]);
    let pairs = tools().flat_map(|tool| reasoning().map(move |reasoning| (tool, reasoning)));
    let formats =
        pairs.map(|(tool, reasoning)| Format::new(tool, reasoning).expect("known parsers"));
    formats.flat_map(|format| [format.clone(), format.with_listed_calls()]).collect()
});

static TOOLS: LazyLock<Arc<Tools>> = LazyLock::new(|| {
    let parameters = json!({"properties": {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"type": "object"},
    }});
    Tools::new([("f", &parameters)]).into()
});

/// Texts that occur between the markers of formats.
const PIECES: [&str; 24] = [
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
    "\n",
    " ",
    "f",
    "a",
    "1",
    "true",
    "name",
    "arguments",
    "f(a=1)",
    "functions.f:0",
    "{\"name\": \"f\", \"arguments\": {",
    "\"a\": ",
];

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // Fails if the data is too short for an input.
    let _ = run(&mut Unstructured::new(data));
});

fn run(data: &mut Unstructured<'_>) -> Result<()> {
    let format = data.choose(&FORMATS)?;
    let start = *data.choose(&[format.start(None), Start::NoReasoning])?;
    let markers = format.markers();
    let known: Vec<&str> = markers.iter().copied().chain(PIECES).collect();
    let mut pieces: Vec<String> = Vec::new();
    while !data.is_empty() {
        let is_known = bool::arbitrary(data)?;
        pieces.push(if is_known {
            (*data.choose(&known)?).to_owned()
        } else {
            char::arbitrary(data)?.to_string()
        });
    }
    let text = pieces.concat();
    let whole = parse(format, start, [text.as_str()]);
    assert_eq!(parse(format, start, pieces.iter().map(String::as_str)), whole, "cut in pieces");
    assert_eq!(parse(format, start, text.split_inclusive(|_| true)), whole, "cut in characters");
    Ok(())
}

/// Parses an answer that arrives in `pieces`.
fn parse<'a>(
    format: &Format,
    start: Start,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Collected {
    let mut answer = Collected::default();
    let mut parser = Parser::new(format, TOOLS.clone(), start);
    pieces.into_iter().for_each(|piece| parser.push(piece, &mut answer));
    parser.finish(&mut answer);
    answer
}
