//! Answers of models in every format: however a text is cut, it says what it says as a whole.
#![no_main]

use std::sync::{Arc, LazyLock};

use chiasm_parse::{Collected, Format, Parser, Start, Tools, reasoning_parsers, tool_parsers};
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use serde_json::json;

/// Every pair of parsers, and the one format of listed calls.
static FORMATS: LazyLock<Vec<Format>> = LazyLock::new(|| {
    let tools = || tool_parsers().map(Some).chain([None]);
    let reasoning = || reasoning_parsers().map(Some).chain([None]);
    let pairs = tools().flat_map(|tool| reasoning().map(move |reasoning| (tool, reasoning)));
    let made = pairs.map(|(tool, reasoning)| Format::new(tool, reasoning).expect("both are known"));
    made.flat_map(|format| [format.clone(), format.with_listed_calls()]).collect()
});

static TOOLS: LazyLock<Arc<Tools>> = LazyLock::new(|| {
    let parameters = json!({"properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}});
    Tools::new([("f", &parameters)]).into()
});

/// Text that formats have between their markers.
const PIECES: [&str; 24] = [
    "{", "}", "[", "]", "(", ")", "\"", "'", ":", ",", "=", "\\", "\n", " ", "f", "a", "1", "true", "name", "arguments",
    "f(a=1)", "functions.f:0", "{\"name\": \"f\", \"arguments\": {", "\"a\": ",
];

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // Too little data makes no input.
    let _ = run(&mut Unstructured::new(data));
});

fn run(data: &mut Unstructured<'_>) -> Result<()> {
    let format = data.choose(&FORMATS)?;
    let start = *data.choose(&[format.start(None), Start::NoReasoning])?;
    let markers = format.markers();
    let known: Vec<&str> = markers.iter().copied().chain(PIECES).collect();
    let mut pieces: Vec<String> = Vec::new();
    while !data.is_empty() {
        pieces.push(match bool::arbitrary(data)? {
            true => (*data.choose(&known)?).to_owned(),
            false => char::arbitrary(data)?.to_string(),
        });
    }
    let text = pieces.concat();
    let whole = read(format, start, [text.as_str()]);
    assert_eq!(read(format, start, pieces.iter().map(String::as_str)), whole, "cut in pieces");
    assert_eq!(read(format, start, text.split_inclusive(|_| true)), whole, "cut in characters");
    Ok(())
}

fn read<'a>(format: &Format, start: Start, pieces: impl IntoIterator<Item = &'a str>) -> Collected {
    let mut answer = Collected::default();
    let mut parser = Parser::new(format, TOOLS.clone(), start);
    pieces.into_iter().for_each(|piece| parser.push(piece, &mut answer));
    parser.finish(&mut answer);
    answer
}
