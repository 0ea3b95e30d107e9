//! Calls between markers, with JSON arguments.

use super::Step;
use super::json::{BytePosition, Nesting, leading_spaces};
use crate::pending::{Markers, NextMarker, Pending};
use crate::{CallEnd, Sink};

/// The syntax of these calls.
#[derive(Debug)]
pub(crate) struct Form {
    /// The beginning of all calls. If it equals `call`, also the beginning of the first call.
    pub(crate) open: &'static str,
    /// The beginning of a call.
    pub(crate) call: &'static str,
    /// The markers between a name and its arguments.
    pub(crate) arguments: &'static [&'static str],
    /// The position of the name in the head, which is the text before the arguments.
    pub(crate) name: NamePosition,
    /// The markers that end arguments. If there are none, arguments end with their JSON.
    pub(crate) end: &'static [&'static str],
    /// The markers that end all calls.
    pub(crate) close: &'static [&'static str],
}

/// The position of the name in a call's head.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NamePosition {
    /// The name is the whole head.
    Whole,
    /// The name follows this marker.
    After(&'static str),
    /// The name precedes this marker.
    Before(&'static str),
    /// The name is a part of the call's id: `functions.NAME:NUMBER`.
    InId,
}

/// A reader of these calls.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    form: &'static Form,
    state: State,
    /// The markers to look for in the current state.
    markers: Markers,
    /// The head of the current call so far.
    head: String,
    /// White space that belongs to the arguments if more of them follow.
    held_spaces: String,
    /// `true` if arguments of the current call were emitted.
    has_arguments: bool,
    json: Nesting,
}

/// The part of the calls at the reader's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Before,
    Between,
    Head,
    Arguments,
}

impl Reader {
    pub(crate) fn new(form: &'static Form) -> Self {
        Self {
            form,
            state: State::Before,
            markers: Markers::new([]),
            head: String::new(),
            held_spaces: String::new(),
            has_arguments: false,
            json: Nesting::default(),
        }
    }

    pub(crate) fn read(
        &mut self,
        pending: &mut Pending,
        is_last: bool,
        sink: &mut dyn Sink,
    ) -> Step {
        loop {
            let step = match self.state {
                State::Before => {
                    pending.skip(self.form.open.len());
                    self.enter(if self.form.open == self.form.call {
                        State::Head
                    } else {
                        State::Between
                    })
                }
                State::Between => self.between(pending, is_last),
                State::Head => self.head(pending, is_last, sink),
                State::Arguments if self.form.end.is_empty() => self.json(pending, is_last, sink),
                State::Arguments => self.arguments(pending, is_last, sink),
            };
            if let Some(step) = step {
                return step;
            }
        }
    }

    fn enter(&mut self, state: State) -> Option<Step> {
        let Form { call, arguments, end, close, .. } = self.form;
        self.state = state;
        self.markers = match state {
            State::Before => return None,
            State::Between => Markers::new(close.iter().chain([call]).copied()),
            State::Head => Markers::new(arguments.iter().chain(*end).chain(*close).copied()),
            State::Arguments => Markers::new(end.iter().copied()),
        };
        None
    }

    /// Skips the text between calls, which has no meaning.
    fn between(&mut self, pending: &mut Pending, is_last: bool) -> Option<Step> {
        // If no marker ends the calls, the first text other than white space does.
        let text_ends = self.form.close.is_empty();
        if text_ends {
            pending.skip(leading_spaces(pending.rest()));
        }
        let NextMarker { clear, marker } = self.markers.find(pending.rest(), is_last);
        if text_ends && clear > 0 {
            return Some(Step::Over);
        }
        pending.skip(clear + marker.map_or(0, str::len));
        match marker {
            None => Some(if is_last { Step::Over } else { Step::More }),
            Some(marker) if marker == self.form.call => self.enter(State::Head),
            Some(_) => Some(Step::Over),
        }
    }

    /// Reads the head of a call, and the marker after it.
    fn head(&mut self, pending: &mut Pending, is_last: bool, sink: &mut dyn Sink) -> Option<Step> {
        let NextMarker { clear, marker } = self.markers.find(pending.rest(), is_last);
        self.head.push_str(&pending.rest()[..clear]);
        pending.skip(clear);
        let Some(marker) = marker else {
            // A call that breaks off within its head is dropped.
            return Some(if is_last { Step::Over } else { Step::More });
        };
        let has_arguments = self.form.arguments.contains(&marker);
        // A call may end after its head.
        let has_no_arguments = !has_arguments && self.form.end.contains(&marker);
        if has_arguments || has_no_arguments {
            self.begin_call(sink);
        }
        if has_no_arguments {
            self.end_call(sink);
        }
        self.head.clear();
        // A bracket is a part of the arguments.
        if marker != "{" {
            pending.skip(marker.len());
        }
        if has_arguments {
            return self.enter(State::Arguments);
        }
        if self.form.close.contains(&marker) {
            Some(Step::Over)
        } else {
            self.enter(State::Between)
        }
    }

    /// Emits the call's name and id.
    fn begin_call(&mut self, sink: &mut dyn Sink) {
        self.has_arguments = false;
        self.json = Nesting::default();
        let head = self.head.trim();
        let (name, id) = match self.form.name {
            NamePosition::Whole => (head, None),
            NamePosition::After(marker) => {
                (head.split_once(marker).map_or(head, |(_, name)| name), None)
            }
            NamePosition::Before(marker) => {
                (head.split_once(marker).map_or(head, |(name, _)| name), None)
            }
            NamePosition::InId => {
                let is_number = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
                let name = head
                    .split_once(':')
                    .filter(|(_, number)| is_number(number))
                    .map_or("", |(name, _)| name);
                (name.strip_prefix("functions.").unwrap_or(name), Some(head))
            }
        };
        sink.call(name.trim(), id);
    }

    /// Reads arguments up to a marker.
    fn arguments(
        &mut self,
        pending: &mut Pending,
        is_last: bool,
        sink: &mut dyn Sink,
    ) -> Option<Step> {
        let NextMarker { clear, marker } = self.markers.find(pending.rest(), is_last);
        self.emit_arguments(&pending.rest()[..clear], sink);
        pending.skip(clear + marker.map_or(0, str::len));
        let Some(marker) = marker else {
            if is_last {
                sink.end_call(CallEnd::Unfinished);
            }
            return Some(if is_last { Step::Over } else { Step::More });
        };
        self.end_call(sink);
        if self.form.close.contains(&marker) {
            Some(Step::Over)
        } else {
            self.enter(State::Between)
        }
    }

    fn end_call(&mut self, sink: &mut dyn Sink) {
        if !self.has_arguments {
            sink.arguments("{}");
        }
        self.held_spaces.clear();
        sink.end_call(CallEnd::Closed);
    }

    /// Emits arguments without the white space around them.
    fn emit_arguments(&mut self, text: &str, sink: &mut dyn Sink) {
        let text = if self.has_arguments { text } else { text.trim_start() };
        let end = text.trim_end().len();
        if end > 0 {
            if !self.held_spaces.is_empty() {
                sink.arguments(&self.held_spaces);
            }
            sink.arguments(&text[..end]);
            self.held_spaces.clear();
            self.has_arguments = true;
        }
        self.held_spaces.push_str(&text[end..]);
    }

    /// Reads arguments up to the end of their JSON.
    fn json(&mut self, pending: &mut Pending, is_last: bool, sink: &mut dyn Sink) -> Option<Step> {
        if !self.has_arguments {
            pending.skip(leading_spaces(pending.rest()));
        }
        let rest = pending.rest();
        if !self.has_arguments && !is_last && self.form.call.starts_with(rest) {
            return Some(Step::More);
        }
        // Without arguments, the next call follows directly.
        let has_no_arguments = !self.has_arguments && rest.starts_with(self.form.call);
        let mut end = has_no_arguments.then_some(0);
        let mut is_too_deep = false;
        for (at, byte) in rest.bytes().enumerate().take_while(|_| !has_no_arguments) {
            match self.json.push(byte) {
                BytePosition::Within => {}
                BytePosition::Last => end = Some(at + 1),
                BytePosition::After => end = Some(at),
                BytePosition::TooDeep => {
                    end = Some(at);
                    is_too_deep = true;
                }
            }
            if end.is_some() {
                break;
            }
        }
        let length = end.unwrap_or(rest.len());
        self.has_arguments |= length > 0;
        if length > 0 {
            sink.arguments(&rest[..length]);
        }
        pending.skip(length);
        match end {
            None if !is_last => return Some(Step::More),
            None => sink.end_call(CallEnd::Unfinished),
            Some(_) if is_too_deep => sink.end_call(CallEnd::Unfinished),
            Some(_) => self.end_call(sink),
        }
        self.enter(State::Between)
    }
}
