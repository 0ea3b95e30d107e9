//! Calls between markers of their own, with a name and arguments that are JSON already.

use super::Step;
use super::json::{Is, Nesting, spaces};
use crate::pending::{Found, Markers, Pending};
use crate::{CallEnd, Sink};

/// The syntax of such calls.
#[derive(Debug)]
pub(crate) struct Form {
    /// The beginning of all calls; that of the first call if `call` is the same.
    pub(crate) open: &'static str,
    /// The beginning of a call.
    pub(crate) call: &'static str,
    /// The markers between a name and its arguments.
    pub(crate) arguments: &'static [&'static str],
    /// The place of the name in the text before the arguments.
    pub(crate) name: NamePlace,
    /// The markers that end arguments. Without any, arguments end with their JSON.
    pub(crate) end: &'static [&'static str],
    /// The markers that end all calls.
    pub(crate) close: &'static [&'static str],
}

/// The place of the name in a call's head.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NamePlace {
    /// It is the whole head.
    Whole,
    /// Behind a marker.
    Behind(&'static str),
    /// Before a marker.
    Before(&'static str),
    /// Within the call's id: `functions.NAME:NUMBER`.
    InId,
}

/// Reads calls of one form.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    form: &'static Form,
    place: Place,
    /// The markers that may follow at the current place.
    markers: Markers,
    head: String,
    /// White space that belongs to the arguments if more of them follows.
    held: String,
    has_arguments: bool,
    json: Nesting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Before,
    Between,
    Head,
    Arguments,
}

impl Reader {
    pub(crate) fn new(form: &'static Form) -> Self {
        Self {
            form,
            place: Place::Before,
            markers: Markers::new([]),
            head: String::new(),
            held: String::new(),
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
            let step = match self.place {
                Place::Before => {
                    pending.skip(self.form.open.len());
                    self.go(if self.form.open == self.form.call {
                        Place::Head
                    } else {
                        Place::Between
                    })
                }
                Place::Between => self.between(pending, is_last),
                Place::Head => self.head(pending, is_last, sink),
                Place::Arguments if self.form.end.is_empty() => self.json(pending, is_last, sink),
                Place::Arguments => self.arguments(pending, is_last, sink),
            };
            if let Some(step) = step {
                return step;
            }
        }
    }

    fn go(&mut self, place: Place) -> Option<Step> {
        let Form { call, arguments, end, close, .. } = self.form;
        self.place = place;
        self.markers = match place {
            Place::Before => return None,
            Place::Between => Markers::new(close.iter().chain([call]).copied()),
            Place::Head => Markers::new(arguments.iter().chain(*end).chain(*close).copied()),
            Place::Arguments => Markers::new(end.iter().copied()),
        };
        None
    }

    /// Skips the text between calls, which means nothing.
    fn between(&mut self, pending: &mut Pending, is_last: bool) -> Option<Step> {
        // Without an end of their own, calls are over with the first text that is more than white
        // space.
        let text_ends = self.form.close.is_empty();
        if text_ends {
            pending.skip(spaces(pending.rest()));
        }
        let (clear, marker) = match self.markers.find(pending.rest(), is_last) {
            Found::Nothing { clear } => (clear, None),
            Found::Marker { at, number } => (at, Some(self.markers.text(number))),
        };
        if text_ends && clear > 0 {
            return Some(Step::Over);
        }
        pending.skip(clear + marker.map_or(0, str::len));
        match marker {
            None => Some(if is_last { Step::Over } else { Step::More }),
            Some(marker) if marker == self.form.call => self.go(Place::Head),
            Some(_) => Some(Step::Over),
        }
    }

    fn head(&mut self, pending: &mut Pending, is_last: bool, sink: &mut dyn Sink) -> Option<Step> {
        let (clear, marker) = match self.markers.find(pending.rest(), is_last) {
            Found::Nothing { clear } => (clear, None),
            Found::Marker { at, number } => (at, Some(self.markers.text(number))),
        };
        self.head.push_str(&pending.rest()[..clear]);
        pending.skip(clear);
        let Some(marker) = marker else {
            // A call that breaks off before its arguments is none.
            return Some(if is_last { Step::Over } else { Step::More });
        };
        let has_arguments = self.form.arguments.contains(&marker);
        // A call that ends with its head has none.
        let has_none = !has_arguments && self.form.end.contains(&marker);
        if has_arguments || has_none {
            self.tell(sink);
        }
        if has_none {
            self.end_call(sink);
        }
        self.head.clear();
        // A bracket is one of the arguments.
        if marker != "{" {
            pending.skip(marker.len());
        }
        if has_arguments {
            return self.go(Place::Arguments);
        }
        if self.form.close.contains(&marker) { Some(Step::Over) } else { self.go(Place::Between) }
    }

    fn tell(&mut self, sink: &mut dyn Sink) {
        self.has_arguments = false;
        self.json = Nesting::default();
        let head = self.head.trim();
        let (name, id) = match self.form.name {
            NamePlace::Whole => (head, None),
            NamePlace::Behind(marker) => {
                (head.split_once(marker).map_or(head, |(_, name)| name), None)
            }
            NamePlace::Before(marker) => {
                (head.split_once(marker).map_or(head, |(name, _)| name), None)
            }
            NamePlace::InId => {
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

    /// Arguments up to a marker.
    fn arguments(
        &mut self,
        pending: &mut Pending,
        is_last: bool,
        sink: &mut dyn Sink,
    ) -> Option<Step> {
        let (clear, marker) = match self.markers.find(pending.rest(), is_last) {
            Found::Nothing { clear } => (clear, None),
            Found::Marker { at, number } => (at, Some(self.markers.text(number))),
        };
        self.pass_on(&pending.rest()[..clear], sink);
        pending.skip(clear + marker.map_or(0, str::len));
        let Some(marker) = marker else {
            if is_last {
                sink.end_call(CallEnd::Unfinished);
            }
            return Some(if is_last { Step::Over } else { Step::More });
        };
        self.end_call(sink);
        if self.form.close.contains(&marker) { Some(Step::Over) } else { self.go(Place::Between) }
    }

    fn end_call(&mut self, sink: &mut dyn Sink) {
        if !self.has_arguments {
            sink.arguments("{}");
        }
        self.held.clear();
        sink.end_call(CallEnd::Closed);
    }

    /// Passes arguments on, without the white space around them.
    fn pass_on(&mut self, text: &str, sink: &mut dyn Sink) {
        let text = if self.has_arguments { text } else { text.trim_start() };
        let end = text.trim_end().len();
        if end > 0 {
            if !self.held.is_empty() {
                sink.arguments(&self.held);
            }
            sink.arguments(&text[..end]);
            self.held.clear();
            self.has_arguments = true;
        }
        self.held.push_str(&text[end..]);
    }

    /// Arguments up to the end of their JSON.
    fn json(&mut self, pending: &mut Pending, is_last: bool, sink: &mut dyn Sink) -> Option<Step> {
        if !self.has_arguments {
            pending.skip(spaces(pending.rest()));
        }
        let rest = pending.rest();
        if !self.has_arguments && !is_last && self.form.call.starts_with(rest) {
            return Some(Step::More);
        }
        // The next call may follow at once.
        let has_none = !self.has_arguments && rest.starts_with(self.form.call);
        let mut end = has_none.then_some(0);
        let mut is_too_deep = false;
        for (at, byte) in rest.bytes().enumerate().take_while(|_| !has_none) {
            match self.json.take(byte) {
                Is::Within => {}
                Is::Last => end = Some(at + 1),
                Is::Behind => end = Some(at),
                Is::TooDeep => {
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
        self.go(Place::Between)
    }
}
