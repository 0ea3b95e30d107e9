//! Gemma's calls: `call:get_weather{city:<|"|>Paris<|"|>,days:3}` between markers.

use super::Step;
use super::value::Value;
use crate::pending::{Markers, NextMarker, Pending};
use crate::tools::{Types, quoted};
use crate::{CallEnd, Sink, Tools};

/// The maximum nesting depth of objects and lists. Brackets beyond it are plain text.
const MAX_DEPTH: usize = 64;

/// The syntax of these calls.
#[derive(Debug)]
pub(crate) struct Form {
    /// The beginning of a call.
    pub(crate) open: &'static str,
    /// The quote around text.
    pub(crate) quote: &'static str,
    /// The end of a call.
    pub(crate) close: &'static str,
}

/// A reader of one call, which streams its arguments.
///
/// The end of a call also closes each value, object and list that is still open. The last brace is
/// only emitted then, so the arguments of an unfinished call are never whole JSON.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    form: &'static Form,
    markers: Markers,
    state: State,
    /// The head, key or unquoted value so far.
    word: String,
    name: String,
    /// The open objects and lists, outermost first.
    levels: Vec<Level>,
    /// The possible types of the next value, if they are known.
    types: Option<Types>,
    value: Value,
}

/// The position of the reader in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Before,
    Head,
    BeforeKey,
    Key,
    QuotedKey,
    AfterQuotedKey,
    /// Before an element of a list.
    BeforeElement,
    BeforeValue,
    Word,
    Quoted,
    /// After the arguments.
    After,
}

/// An open object or list.
#[derive(Clone, Copy, Debug)]
struct Level {
    is_list: bool,
    is_empty: bool,
}

/// A piece of a call's text.
enum Piece<'a> {
    Char(char),
    /// Text within quotes.
    Text(&'a str),
    Quote,
}

impl Reader {
    pub(crate) fn new(form: &'static Form) -> Self {
        Self {
            form,
            markers: Markers::new([form.close, form.quote]),
            state: State::Before,
            word: String::new(),
            name: String::new(),
            levels: Vec::new(),
            types: None,
            value: Value::new(None, false, false),
        }
    }

    pub(crate) fn read(
        &mut self,
        pending: &mut Pending,
        is_last: bool,
        tools: &Tools,
        sink: &mut dyn Sink,
    ) -> Step {
        if self.state == State::Before {
            pending.skip(self.form.open.len());
            self.state = State::Head;
        }
        loop {
            let NextMarker { clear, marker } = self.markers.find(pending.rest(), is_last);
            self.text(&pending.rest()[..clear], tools, sink);
            pending.skip(clear + marker.map_or(0, str::len));
            match marker {
                Some(marker) if marker == self.form.quote => self.piece(Piece::Quote, tools, sink),
                // Within quotes, the other marker is text.
                Some(marker) if matches!(self.state, State::Quoted | State::QuotedKey) => {
                    self.text(marker, tools, sink);
                }
                Some(_) => {
                    self.close(sink);
                    return Step::Over;
                }
                None if is_last => {
                    if !self.levels.is_empty() {
                        sink.end_call(CallEnd::Unfinished);
                    }
                    return Step::Over;
                }
                None => return Step::More,
            }
        }
    }

    fn text(&mut self, text: &str, tools: &Tools, sink: &mut dyn Sink) {
        if matches!(self.state, State::Quoted | State::QuotedKey) {
            return self.piece(Piece::Text(text), tools, sink);
        }
        for char in text.chars() {
            self.piece(Piece::Char(char), tools, sink);
        }
    }

    /// Reads a piece, in each state that it leads to.
    fn piece(&mut self, piece: Piece<'_>, tools: &Tools, sink: &mut dyn Sink) {
        while !self.consume(&piece, tools, sink) {}
    }

    /// Reads a piece in the current state. Returns `false` if the piece only changed the state and
    /// was not consumed.
    fn consume(&mut self, piece: &Piece<'_>, tools: &Tools, sink: &mut dyn Sink) -> bool {
        match (self.state, piece) {
            (State::Head, Piece::Char('{')) => self.begin(sink),
            (State::Head, Piece::Char(char)) => self.word.push(*char),
            (State::BeforeKey, Piece::Quote) => self.state = State::QuotedKey,
            (State::BeforeKey | State::BeforeElement, Piece::Char(' ' | ',' | '\n' | '\t')) => {}
            (State::BeforeKey, Piece::Char('}')) => self.end_level(sink),
            (State::BeforeKey, Piece::Char(_)) => {
                self.state = State::Key;
                return false;
            }
            (State::Key | State::AfterQuotedKey, Piece::Char(':')) => self.end_key(tools, sink),
            // A key without a value is dropped.
            (State::Key, Piece::Char('}')) => {
                self.word.clear();
                self.state = State::BeforeKey;
                return false;
            }
            (State::Key, Piece::Char(char)) => self.word.push(*char),
            (State::Key, Piece::Quote) => self.word.push_str(self.form.quote),
            (State::QuotedKey, Piece::Text(text)) => self.word.push_str(text),
            (State::QuotedKey, Piece::Quote) => self.state = State::AfterQuotedKey,
            (State::AfterQuotedKey, _) => {
                self.word.clear();
                self.state = State::BeforeKey;
                return false;
            }
            // The brace also ends the object around the list.
            (State::BeforeElement, Piece::Char('}')) => {
                self.end_level(sink);
                return false;
            }
            (State::BeforeElement, Piece::Char(']')) => self.end_level(sink),
            (State::BeforeElement, _) => {
                self.separate(sink);
                self.types = None;
                self.state = State::BeforeValue;
                return false;
            }
            (State::BeforeValue, Piece::Quote) => {
                self.value = Value::new(self.types, false, false);
                self.state = State::Quoted;
            }
            (State::BeforeValue, Piece::Char(char)) if char.is_whitespace() => {}
            (State::BeforeValue, Piece::Char('{')) if self.levels.len() <= MAX_DEPTH => {
                self.begin_level(false, sink);
            }
            (State::BeforeValue, Piece::Char('[')) if self.levels.len() <= MAX_DEPTH => {
                self.begin_level(true, sink);
            }
            (State::BeforeValue, _) => {
                self.state = State::Word;
                return false;
            }
            (State::Word, Piece::Char(',' | '}' | ']')) => {
                self.end_word(sink);
                return false;
            }
            (State::Word, Piece::Char(char)) => self.word.push(*char),
            (State::Word, Piece::Quote) => self.word.push_str(self.form.quote),
            (State::Quoted, Piece::Text(text)) => self.value.push(text, sink),
            (State::Quoted, Piece::Quote) => {
                self.value.end(sink);
                self.state = self.after_value();
            }
            (State::Before | State::Head | State::After, _)
            | (State::Quoted | State::QuotedKey, Piece::Char(_))
            | (_, Piece::Text(_)) => {}
        }
        true
    }

    /// Emits the call's name, which is complete.
    fn begin(&mut self, sink: &mut dyn Sink) {
        self.name = name(&self.word).to_owned();
        self.word.clear();
        sink.call(&self.name, None);
        self.begin_level(false, sink);
    }

    fn begin_level(&mut self, is_list: bool, sink: &mut dyn Sink) {
        sink.arguments(if is_list { "[" } else { "{" });
        self.levels.push(Level { is_list, is_empty: true });
        self.state = if is_list { State::BeforeElement } else { State::BeforeKey };
    }

    fn end_level(&mut self, sink: &mut dyn Sink) {
        if self.levels.len() == 1 {
            self.state = State::After;
            return;
        }
        if let Some(level) = self.levels.pop() {
            sink.arguments(if level.is_list { "]" } else { "}" });
        }
        self.state = self.after_value();
    }

    fn after_value(&self) -> State {
        match self.levels.last() {
            Some(Level { is_list: true, .. }) => State::BeforeElement,
            _ => State::BeforeKey,
        }
    }

    /// Emits the comma before a key or an element, unless it is the first one.
    fn separate(&mut self, sink: &mut dyn Sink) {
        let Some(level) = self.levels.last_mut() else { return };
        if !level.is_empty {
            sink.arguments(",");
        }
        level.is_empty = false;
    }

    fn end_key(&mut self, tools: &Tools, sink: &mut dyn Sink) {
        self.separate(sink);
        let word = std::mem::take(&mut self.word);
        let key = if self.state == State::Key { word.trim() } else { word.as_str() };
        sink.arguments(&format!("{}:", quoted(key)));
        let is_argument = self.levels.len() == 1;
        self.types = if is_argument { tools.types(&self.name, key) } else { None };
        self.state = State::BeforeValue;
    }

    /// Ends a value without quotes. A value of unknown type is JSON if it is valid JSON, else text.
    fn end_word(&mut self, sink: &mut dyn Sink) {
        sink.arguments(&self.types.unwrap_or(Types::ANY).to_json(self.word.trim()));
        self.word.clear();
        self.state = self.after_value();
    }

    /// Closes the call and each value, object and list that is still open.
    fn close(&mut self, sink: &mut dyn Sink) {
        match self.state {
            State::Before | State::Head => self.begin(sink),
            State::BeforeValue | State::Word => self.end_word(sink),
            _ => {}
        }
        while let Some(level) = self.levels.pop() {
            sink.arguments(if level.is_list { "]" } else { "}" });
        }
        sink.end_call(CallEnd::Closed);
    }
}

/// Returns the name in a call's head: `call:NAME`.
fn name(head: &str) -> &str {
    head.rsplit(':').next().unwrap_or(head).trim()
}
