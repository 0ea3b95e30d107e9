//! A bounded reader of request bodies: it limits the number of elements, and reserves memory before
//! values are built.
//!
//! A body is read once, by visitors that build the request without an intermediate tree. Short JSON
//! can take many times its own memory (`[[],[]]`, `{},{}`), so each visitor reserves memory from
//! the [`Intake`] first.

mod shortened;

use std::borrow::Cow;
use std::fmt::{Display, Write};
use std::marker::PhantomData;
use std::ops::Range;

use bytes::Bytes;
use chiasm_media::{ByteBudget, Charge, MediaError};
use chiasm_prompt::ChatTemplate;
use chiasm_request::MediaRef;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::body_limits::BodyLimits;
use super::type_errors;
use crate::error::ApiError;

use shortened::Shortened;

/// The maximum memory that planning takes for each byte of prompt text: copies in the template's
/// values, the rendered prompt and its tokens.
pub const PLANNING_BYTES_PER_TEXT_BYTE: u64 = 8;
/// The memory that planning takes for a message, besides its text: objects and names in the
/// template's values.
const PLANNING_BYTES_PER_MESSAGE: u64 = 3 << 10;
/// The memory that planning takes for a part of a message's content, besides its text.
const PLANNING_BYTES_PER_PART: u64 = 1 << 10;
/// The step by which the charge grows. Most requests need one step.
const CHARGE_STEP_BYTES: u64 = 1 << 10;
/// The memory that an allocation takes besides its content.
const ALLOCATION_OVERHEAD_BYTES: u64 = 16;
/// The maximum size of text that is copied instead of keeping the whole body in memory: a URL, not
/// a file.
const MAX_COPIED_BYTES: usize = 8 << 10;
/// The byte order mark that some clients write before UTF-8. Python's JSON reader accepts it, too.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// The maximum length of a field's name. No valid name is longer, and errors would repeat it.
const MAX_NAME_BYTES: usize = 256;

/// A bounded reader of one request body.
pub struct Intake {
    body: Bytes,
    /// The JSON that is parsed in place of the body, if it is much shorter. [`Intake::copy_text`],
    /// [`Intake::copy_prompt`] and [`Intake::share`] take the full strings from the body.
    shortened: Option<Shortened>,
    budget: ByteBudget,
    charge: Charge,
    /// The bytes reserved so far; never more than `charge` covers.
    reserved_bytes: u64,
    /// The reserved bytes of the parser's own buffer, which holds the longest string with escapes.
    scratch_bytes: u64,
    quotas: Quotas,
    /// The path of the current field, such as `messages[2].content[1].text`.
    field: String,
    /// The error that stopped reading; `None` if the JSON itself is invalid.
    refusal: Option<ApiError>,
    /// The media items so far, in order of appearance.
    pub media: Vec<MediaRef>,
    /// The nesting depth of the current JSON value.
    pub depth: usize,
    /// The chat template for the request's messages, if there is one. It may support more roles and
    /// fields than the API.
    pub template: Option<ChatTemplate>,
}

/// The remaining numbers of elements that may be built.
struct Quotas {
    values: Quota,
    messages: Quota,
    parts: Quota,
}

/// The remaining number of elements of one kind.
struct Quota {
    limit: usize,
    remaining: usize,
    /// The plural name of the elements, for errors.
    elements: &'static str,
    /// The flag that sets the limit, for errors.
    flag: &'static str,
}

impl Intake {
    /// Creates an intake for `body`. A leading byte order mark is skipped.
    pub fn new(body: Bytes, limits: &BodyLimits, budget: &ByteBudget) -> Self {
        let body = if body.starts_with(BYTE_ORDER_MARK) {
            body.slice(BYTE_ORDER_MARK.len()..)
        } else {
            body
        };
        let quota = |limit, elements, flag| Quota { limit, remaining: limit, elements, flag };
        Self {
            body,
            shortened: None,
            budget: budget.clone(),
            charge: budget.empty_charge(),
            reserved_bytes: 0,
            scratch_bytes: 0,
            quotas: Quotas {
                values: quota(limits.json_values, "values", "--max-json-values"),
                messages: quota(limits.messages, "messages", "--max-messages"),
                parts: quota(limits.content_parts, "content parts", "--max-content-parts"),
            },
            field: String::new(),
            refusal: None,
            media: Vec::new(),
            depth: 0,
            template: None,
        }
    }

    /// Parses the whole body.
    ///
    /// # Errors
    /// Fails with the error for status 400 if the JSON is invalid or a value has a wrong type.
    /// Fails with the error for 413 or 503 if a limit or the memory is exceeded. Each error names
    /// the field.
    pub fn read<T>(&mut self) -> Result<T, ApiError>
    where
        for<'a, 'de> Seed<'a, T>: Visitor<'de, Value = T>,
    {
        self.shortened = Shortened::new(&self.body);
        let bytes = self.shortened.as_ref().map_or(0, Shortened::heap_bytes);
        let json = self.json().clone();
        let mut json = serde_json::Deserializer::from_slice(&json);
        let read = self.reserve(bytes).and_then(|()| self.seed().deserialize(&mut json));
        read.and_then(|value| json.end().map(|()| value)).map_err(|error| self.api_error(&error))
    }

    /// Returns the JSON that [`Intake::read`] parses: the body, or the body with its longest
    /// strings shortened.
    pub fn json(&self) -> &Bytes {
        self.shortened.as_ref().map_or(&self.body, |short| &short.json)
    }

    /// Maps an offset in [`Intake::json`] to the offset in the body.
    pub fn body_offset(&self, offset: usize) -> usize {
        self.shortened.as_ref().map_or(offset, |short| short.body_offset(offset))
    }

    /// Returns the body, without a byte order mark.
    pub fn body(&self) -> Bytes {
        self.body.clone()
    }

    /// Returns the charge for all reserved memory, which is held until the charge is dropped.
    pub fn into_charge(self) -> Charge {
        self.charge
    }

    /// Returns a seed that builds a `T` from the next JSON value.
    pub fn seed<T>(&mut self) -> Seed<'_, T> {
        Seed { intake: self, target: PhantomData }
    }

    /// Returns the name of an object's next field; `None` at the end of the object.
    pub fn next_name<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
    ) -> Result<Option<Cow<'de, str>>, A::Error> {
        let Some(Text(name)) = map.next_key()? else { return Ok(None) };
        if name.len() > MAX_NAME_BYTES {
            let message = format!("a field's name has more than {MAX_NAME_BYTES} bytes");
            return Err(self.refuse_here(|field| ApiError::invalid(field, message)));
        }
        Ok(Some(name))
    }

    /// Enters a field or an element below the current one. Returns the argument for
    /// [`Self::leave`].
    pub fn enter(&mut self, step: impl Display) -> usize {
        let outer = self.field.len();
        // Writing to a string does not fail.
        let _ = write!(self.field, "{step}");
        outer
    }

    /// Returns to the path before [`Self::enter`]. Must not be called after an error, which names
    /// the current path.
    pub fn leave(&mut self, outer: usize) {
        self.field.truncate(outer);
    }

    /// Returns the path of a field below the current one.
    pub fn child_path(&self, step: &str) -> String {
        format!("{}{step}", self.field)
    }

    /// Counts one JSON value that is kept as a JSON value.
    pub fn count_value<E: Error>(&mut self) -> Result<(), E> {
        self.count(|quotas| &mut quotas.values)
    }

    /// Counts one message.
    pub fn count_message<E: Error>(&mut self) -> Result<(), E> {
        self.count(|quotas| &mut quotas.messages)?;
        self.reserve(PLANNING_BYTES_PER_MESSAGE)
    }

    /// Counts one part of a message's content.
    pub fn count_part<E: Error>(&mut self) -> Result<(), E> {
        self.count(|quotas| &mut quotas.parts)?;
        self.reserve(PLANNING_BYTES_PER_PART)
    }

    fn count<E: Error>(&mut self, select: impl FnOnce(&mut Quotas) -> &mut Quota) -> Result<(), E> {
        let Quota { limit, remaining, elements, flag } = select(&mut self.quotas);
        if let Some(less) = remaining.checked_sub(1) {
            *remaining = less;
            return Ok(());
        }
        let message = format!("the request has more than {limit} {elements} ({flag})");
        Err(self.refuse_here(|field| ApiError::too_many(field, message)))
    }

    /// Reserves memory for `bytes` that are about to be built.
    pub fn reserve<E: Error>(&mut self, bytes: u64) -> Result<(), E> {
        self.reserved_bytes += bytes;
        let missing = self.reserved_bytes.checked_sub(self.charge.bytes());
        let Some(more) = missing.filter(|&more| more > 0) else {
            return Ok(());
        };
        self.charge
            .grow(more.next_multiple_of(CHARGE_STEP_BYTES))
            .or_else(|_| self.charge.grow(more))
            .map_err(|busy| self.memory_error(busy))
    }

    /// Reserves memory for `bytes` that are about to be built from a field that was read before.
    pub fn reserve_for(&mut self, field: &str, bytes: u64) -> Result<(), ApiError> {
        field.clone_into(&mut self.field);
        self.reserve::<serde_json::Error>(bytes).map_err(|error| self.api_error(&error))
    }

    /// Stops reading for lack of memory: the budget is used up for now, or the request exceeds it.
    fn memory_error<E: Error>(&mut self, busy: MediaError) -> E {
        if self.body.len() as u64 + self.reserved_bytes <= self.budget.limit() {
            return self.refuse_here(|field| ApiError::from(busy).at(field));
        }
        let message =
            "the request needs more memory than allowed (--max-bytes-in-flight)".to_owned();
        self.refuse_here(|field| ApiError::too_many(field, message))
    }

    /// Appends to a list, whose memory is reserved as it grows.
    pub fn push<T, E: Error>(&mut self, list: &mut Vec<T>, item: T) -> Result<(), E> {
        if list.len() == list.capacity() {
            let more = list.capacity().max(4);
            let overhead = if list.is_empty() { ALLOCATION_OVERHEAD_BYTES } else { 0 };
            self.reserve((more * size_of::<T>()) as u64 + overhead)?;
            list.reserve_exact(more);
        }
        list.push(item);
        Ok(())
    }

    /// Copies text of a prompt out of the body, and reserves the memory for planning it.
    pub fn copy_prompt<E: Error>(&mut self, text: &str) -> Result<String, E> {
        let length = self.full_range(text).map_or(text.len(), |range| range.len());
        self.reserve(PLANNING_BYTES_PER_TEXT_BYTE * length as u64)?;
        self.copy_text(text)
    }

    /// Reserves the memory for planning a field's text that was read as a JSON value.
    ///
    /// # Errors
    /// Fails if there is not enough memory.
    pub(super) fn plan_text(&mut self, field: &str, text: &str) -> Result<(), ApiError> {
        let outer = self.enter(field);
        let reserved = self.reserve(PLANNING_BYTES_PER_TEXT_BYTE * text.len() as u64);
        reserved.map_err(|error: serde_json::Error| self.api_error(&error))?;
        self.leave(outer);
        Ok(())
    }

    /// Copies text out of the body.
    pub fn copy_text<E: Error>(&mut self, text: &str) -> Result<String, E> {
        if let Some(range) = self.full_range(text) {
            self.reserve(range.len() as u64 + ALLOCATION_OVERHEAD_BYTES)?;
            return String::from_utf8(self.body[range].to_vec()).map_err(E::custom);
        }
        if !self.is_borrowed(text) {
            // The parser resolved the escapes in its own buffer. It keeps that buffer, which grows
            // by doubling.
            let more = (2 * text.len() as u64).saturating_sub(self.scratch_bytes);
            self.scratch_bytes += more;
            self.reserve(more)?;
        }
        self.reserve(text.len() as u64 + ALLOCATION_OVERHEAD_BYTES)?;
        Ok(text.to_owned())
    }

    /// Returns the bytes of text that may be as large as the body itself.
    ///
    /// Long text without escapes is not copied: it shares the body, which stays in memory as long
    /// as the returned bytes.
    pub fn share<E: Error>(&mut self, text: &str) -> Result<Bytes, E> {
        if let Some(range) = self.full_range(text) {
            return Ok(self.body.slice(range));
        }
        if text.len() > MAX_COPIED_BYTES && self.body.as_ptr_range().contains(&text.as_ptr()) {
            return Ok(self.body.slice_ref(text.as_bytes()));
        }
        self.copy_text(text).map(Bytes::from)
    }

    /// Returns the body's range of a string that was shortened for the parser; `None` for other
    /// strings.
    fn full_range(&self, text: &str) -> Option<Range<usize>> {
        self.shortened.as_ref()?.full_range(text)
    }

    /// Returns `true` if the parser borrowed the text from its input and took no memory for it.
    fn is_borrowed(&self, text: &str) -> bool {
        self.json().as_ptr_range().contains(&text.as_ptr())
    }

    /// Adds a media item.
    pub fn add_media<E: Error>(&mut self, item: MediaRef) -> Result<(), E> {
        self.reserve(item.field.len() as u64 + ALLOCATION_OVERHEAD_BYTES)?;
        let mut media = std::mem::take(&mut self.media);
        self.push(&mut media, item)?;
        self.media = media;
        Ok(())
    }

    /// Reads and copies a field's string; `None` for null.
    pub fn next_text<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
    ) -> Result<Option<String>, A::Error> {
        self.next_str(map)?.map(|text| self.copy_text(&text)).transpose()
    }

    /// Reads a field's string without keeping it; `None` for null.
    pub fn next_str<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
    ) -> Result<Option<Cow<'de, str>>, A::Error> {
        Ok(map.next_value::<Option<Text<'de>>>()?.map(|Text(text)| text))
    }

    /// Reads a field of a part that is unknown to the API.
    ///
    /// Adds the field to `fields` if the template reads it. Otherwise it is skipped, as by
    /// [`Self::skip_unknown`].
    pub fn read_template_field<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
        name: &str,
        fields: &mut Map<String, Value>,
        first_unknown: &mut Option<String>,
    ) -> Result<(), A::Error> {
        if !self.template.as_ref().is_some_and(|template| template.reads_part_field(name)) {
            return self.skip_unknown(map, first_unknown);
        }
        let reserved_before = self.reserved_bytes;
        let value: Value = map.next_value_seed(self.seed())?;
        if value.is_null() {
            return Ok(());
        }
        // Planning takes as much memory for the value as for the text of a prompt.
        self.reserve(PLANNING_BYTES_PER_TEXT_BYTE * (self.reserved_bytes - reserved_before))?;
        self.insert(fields, name, value)
    }

    /// Skips an unknown field. Sets `first_unknown` to the field's path if it is still `None` and
    /// the value is not null.
    pub fn skip_unknown<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
        first_unknown: &mut Option<String>,
    ) -> Result<(), A::Error> {
        let value: Value = map.next_value_seed(self.seed())?;
        if !value.is_null() {
            first_unknown.get_or_insert_with(|| self.field.clone());
        }
        Ok(())
    }

    /// Stops reading: records `error` and returns the parser's error.
    pub fn refuse<E: Error>(&mut self, error: ApiError) -> E {
        self.refusal = Some(error);
        E::custom("refused")
    }

    /// Stops reading because of the current field, whose path is passed to `error`.
    pub fn refuse_here<E: Error>(&mut self, error: impl FnOnce(&str) -> ApiError) -> E {
        let error = error(if self.field.is_empty() { "body" } else { &self.field });
        self.refuse(error)
    }

    /// Stops reading because a field below the current one is missing.
    pub fn missing<E: Error>(&mut self, step: &str) -> E {
        let error = ApiError::missing(&self.child_path(step));
        self.refuse(error)
    }

    /// Stops reading if there was an unknown field.
    pub fn refuse_unknown<E: Error>(&mut self, first_unknown: Option<String>) -> Result<(), E> {
        first_unknown.map_or(Ok(()), |field| Err(self.refuse(ApiError::unsupported(field))))
    }

    /// Converts a parser's error to the error for the client.
    fn api_error(&mut self, error: &serde_json::Error) -> ApiError {
        if let Some(refusal) = self.refusal.take() {
            return refusal;
        }
        let message = self.parser_message(error);
        match self.field.as_str() {
            _ if !error.is_data() => ApiError::invalid_json(message),
            "" => ApiError::invalid("body", format!("the body: {message}")),
            field => ApiError::invalid(field, format!("'{field}': {message}")),
        }
    }

    /// Returns the parser's error message, with the position in the original body.
    fn parser_message(&self, error: &serde_json::Error) -> String {
        let message = error.to_string();
        let line = error.line();
        let column = error.column();
        let position = format!(" at line {line} column {column}");
        let Some(cause) = message.strip_suffix(&position) else {
            return type_errors::reword(&message);
        };
        let column = match &self.shortened {
            Some(short) => short.body_column(line, column),
            None => column,
        };
        format!("{} at line {line} column {column}", type_errors::reword(cause))
    }
}

/// A string, borrowed from the body if it has no escapes.
#[derive(Deserialize)]
pub struct Text<'a>(#[serde(borrow)] pub Cow<'a, str>);

/// Builds a `T` within the limits of an intake. The implementations of [`Visitor`] for `Seed`
/// define how each type is built.
pub struct Seed<'a, T> {
    /// The intake of the body.
    pub intake: &'a mut Intake,
    target: PhantomData<T>,
}

impl<'a, 'de, T> DeserializeSeed<'de> for Seed<'a, T>
where
    Seed<'a, T>: Visitor<'de, Value = T>,
{
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_any(self)
    }
}

#[cfg(test)]
impl Intake {
    /// Creates an intake for a JSON body, with the default limits and ample memory.
    pub fn from_json(body: &Value) -> Self {
        Self::new(body.to_string().into(), &BodyLimits::default(), &ByteBudget::new(1 << 30))
    }
}
