//! Clients' own names for media items (`uuid`), which are resolved here and not forwarded.
//!
//! A server takes two items with the same name for one item, even if different clients chose the
//! name, and it only knows names that were sent to it. So each named item is opened here, as for an
//! engine. The request is then forwarded as if the client had sent the item itself without a name.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_api::forward::{ForwardBody, model_name_range};
use chiasm_api::openai::media_parts::{MEDIA_KINDS, MediaKind};
use chiasm_cpu::price;
use chiasm_media::{Charge, EncodedMedia, MediaInput, MediaName, MediaPart};
use chiasm_pipeline::{RequestContext, RequestError, check_counts};
use chiasm_request::MediaRef;
use futures_util::future::try_join_all;
use serde_json::{Map, Value, json};

use super::MAX_INLINE_BYTES;
use crate::endpoint_state::EndpointState;

type Fields = Map<String, Value>;

/// The fields of a request that are lists of messages.
const MESSAGE_FIELDS: [&str; 2] = ["messages", "input"];
/// The fields of a message that are lists of parts.
const PART_FIELDS: [&str; 2] = ["content", "output"];

/// A part of a request that has a `uuid`.
struct NamedPart {
    /// The part's path, as a JSON pointer.
    pointer: String,
    /// The item; `None` if the part is of no known kind of media, or if the name is not a string.
    media: Option<(&'static MediaKind, MediaRef)>,
}

/// A change to one part: its names are removed and `item` is inserted.
struct Change {
    pointer: String,
    /// `None` if the part already has its item, or if the item is left to the server.
    item: Option<(&'static MediaKind, EncodedMedia)>,
}

/// Returns the request without clients' names. A part with only a name, or with a name and a URL,
/// gets the item itself. The charge covers these items for as long as the request is kept.
///
/// An item that can't be fetched here stays in the request as its URL, and is not remembered under
/// its name.
///
/// # Errors
/// Fails for an unknown name without an item, for a malformed name, and for too many named items.
pub(super) async fn resolve(
    state: &EndpointState,
    caller: &RequestContext,
    request: ForwardBody,
) -> Result<(ForwardBody, Option<Charge>), RequestError> {
    let named = named_parts(&request.fields);
    if named.is_empty() {
        return Ok((request, None));
    }
    let items: Vec<MediaRef> =
        named.iter().filter_map(|part| Some(part.media.as_ref()?.1.clone())).collect();
    check_counts(&items, |modality| state.pipeline.limits.items_per_prompt.get(modality))?;
    // The items' sources are copies of parts of the body.
    let mut charge = state
        .pipeline
        .media
        .budget()
        .charge(request.body.len() as u64)
        .map_err(RequestError::from)?;
    let salt = request.fields.get("cache_salt").and_then(Value::as_str).map(str::as_bytes);
    let owner = [caller.credentials.as_deref(), salt];
    let changes = try_join_all(named.into_iter().map(|part| open(state, owner, part))).await?;
    let added: u64 =
        changes.iter().filter_map(|change| Some(base64_len(&change.item.as_ref()?.1))).sum();
    // Each item is held twice: in the fields and in the body.
    charge.grow(2 * added).map_err(RequestError::from)?;
    let bytes = request.body.len() + added as usize;
    let apply = move || rewrite(request, changes);
    let rewritten = state
        .pipeline
        .cpu
        .run_inline_if(bytes <= MAX_INLINE_BYTES, &caller.cpu, price::json(bytes, 0), apply)
        .await?;
    Ok((rewritten?, Some(charge)))
}

/// Returns the parts that have names.
fn named_parts(fields: &Fields) -> Vec<NamedPart> {
    let mut named = Vec::new();
    for list in MESSAGE_FIELDS {
        for (index, element) in elements(fields.get(list)) {
            for content in PART_FIELDS {
                for (part_index, part) in elements(element.get(content)) {
                    let path = PartPath {
                        pointer: format!("/{list}/{index}/{content}/{part_index}"),
                        field: format!("{list}[{index}].{content}[{part_index}]"),
                    };
                    // A tool's result has parts of its own.
                    for (inner_index, inner) in elements(part.get("content")) {
                        named.extend(named_part(inner, path.inner(inner_index)));
                    }
                    named.extend(named_part(part, path));
                }
            }
        }
    }
    named
}

fn elements(list: Option<&Value>) -> impl Iterator<Item = (usize, &Fields)> {
    let elements = list.and_then(Value::as_array).into_iter().flatten().enumerate();
    elements.filter_map(|(index, element)| Some((index, element.as_object()?)))
}

/// A part's path in a request.
struct PartPath {
    /// The path as a JSON pointer.
    pointer: String,
    /// The path as error messages name it: `messages[0].content[1]`.
    field: String,
}

impl PartPath {
    fn inner(&self, index: usize) -> Self {
        Self {
            pointer: format!("{}/content/{index}", self.pointer),
            field: format!("{}.content[{index}]", self.field),
        }
    }
}

/// Returns the part if it has a name in any of the places where servers look for one.
fn named_part(part: &Fields, path: PartPath) -> Option<NamedPart> {
    let inner = MEDIA_KINDS.iter().find_map(|kind| part.get(kind.field)?.get("uuid"));
    let outer = part.get("uuid");
    outer.or(inner)?;
    let PartPath { pointer, field } = path;
    let name = [outer, inner].into_iter().flatten().find_map(Value::as_str);
    let media = MediaKind::find(part).zip(name).map(|(kind, name)| {
        let source = source_url(part, kind).map(|text| MediaInput::Url(text.into()));
        let field = format!("{field}.{}", kind.field);
        (
            kind,
            MediaRef {
                modality: kind.modality.clone(),
                source,
                uuid: Some(name.to_owned()),
                field,
            },
        )
    });
    Some(NamedPart { pointer, media })
}

/// Returns the URL of a part's item, or a data URL for an inline item.
fn source_url(part: &Fields, kind: &MediaKind) -> Option<String> {
    let value = part.get(kind.field)?;
    if kind.is_inline {
        return value.get("data")?.as_str().map(|data| format!("data:;base64,{data}"));
    }
    value.as_str().or_else(|| value.get("url")?.as_str()).map(str::to_owned)
}

/// Opens a part's item under its name.
async fn open(
    state: &EndpointState,
    owner: [Option<&[u8]>; 2],
    part: NamedPart,
) -> Result<Change, RequestError> {
    let NamedPart { pointer, media } = part;
    let Some((kind, MediaRef { modality, source, uuid, field })) = media else {
        return Ok(Change { pointer, item: None });
    };
    let at_field = |error| RequestError::from(error).at(&field);
    let name =
        uuid.as_deref().map(|uuid| MediaName::new(owner, uuid)).transpose().map_err(at_field)?;
    let has_source = source.is_some();
    let is_data = source.as_ref().is_some_and(is_data);
    let item = match state.pipeline.media.open(MediaPart { source, name, modality }).await {
        Ok(item) => (!is_data).then_some((kind, item)),
        Err(error) if has_source => {
            tracing::debug!(
                %error,
                field,
                "can't open a named media item; its URL is forwarded without the name"
            );
            None
        }
        Err(error) => return Err(at_field(error)),
    };
    Ok(Change { pointer, item })
}

/// Returns `true` if the source is a data URL, which has the item itself.
fn is_data(source: &MediaInput) -> bool {
    source.text().get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"data:"))
}

fn base64_len(item: &EncodedMedia) -> u64 {
    (item.bytes.len() as u64).div_ceil(3) * 4
}

/// Applies the changes and serializes the body again.
fn rewrite(request: ForwardBody, changes: Vec<Change>) -> Result<ForwardBody, RequestError> {
    let mut fields = Value::Object(Arc::unwrap_or_clone(request.fields));
    for Change { pointer, item } in changes {
        let Some(part) = fields.pointer_mut(&pointer).and_then(Value::as_object_mut) else {
            continue;
        };
        part.shift_remove("uuid");
        for kind in &MEDIA_KINDS {
            if let Some(Value::Object(media)) = part.get_mut(kind.field) {
                media.shift_remove("uuid");
            }
        }
        if let Some((kind, item)) = item {
            fill(part, kind, &item);
        }
    }
    let body =
        serde_json::to_vec(&fields).map_err(|error| RequestError::internal(error.to_string()))?;
    let model_range =
        model_name_range(&body).map_err(|error| RequestError::internal(error.to_string()))?;
    let Value::Object(fields) = fields else {
        return Err(RequestError::internal("the request body is not an object"));
    };
    Ok(ForwardBody { body: body.into(), model_range, fields: Arc::new(fields), ..request })
}

/// Inserts an item into a part of its kind.
fn fill(part: &mut Fields, kind: &MediaKind, item: &EncodedMedia) {
    // The Responses API has an image's URL as a plain string.
    let is_text = part.get("type").is_some_and(|name| name == "input_image");
    let value = part.entry(kind.field).or_insert(Value::Null);
    if kind.is_inline {
        let format = value.get("format").filter(|format| format.is_string()).cloned();
        let format = format.unwrap_or_else(|| recording_format(&item.bytes).into());
        *value = json!({"data": STANDARD.encode(&item.bytes), "format": format});
        return;
    }
    let url = Value::from(item.to_data_url());
    match value {
        Value::Object(fields) => drop(fields.insert("url".to_owned(), url)),
        value if is_text || value.is_string() => *value = url,
        value => *value = json!({"url": url}),
    }
}

/// Returns the format of a recording by its first bytes.
fn recording_format(bytes: &[u8]) -> &'static str {
    match bytes {
        [b'R', b'I', b'F', b'F', ..] => "wav",
        [b'f', b'L', b'a', b'C', ..] => "flac",
        [b'O', b'g', b'g', b'S', ..] => "ogg",
        _ => "mp3",
    }
}

#[cfg(test)]
mod tests {
    use chiasm_api::openai::{BodyLimits, Intake, RequestBody};
    use chiasm_media::ByteBudget;

    use super::*;

    const GIF: &[u8] =
        b"GIF87a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;";

    fn image() -> EncodedMedia {
        EncodedMedia::from_bytes(GIF.into(), &Default::default()).unwrap()
    }

    fn intake(body: &str) -> Intake {
        Intake::new(body.to_owned().into(), &BodyLimits::default(), &ByteBudget::new(1 << 30))
    }

    /// Rewrites a body. Each named part without an item gets the image.
    fn rewritten(body: &Value) -> Value {
        let (request, _) = ForwardBody::parse(intake(&body.to_string())).unwrap();
        let changes = named_parts(&request.fields).into_iter().map(|part| {
            let lacking = part.media.filter(|(_, media)| media.source.is_none());
            Change { pointer: part.pointer, item: lacking.map(|(kind, _)| (kind, image())) }
        });
        let changes = changes.collect();
        let request = rewrite(request, changes).unwrap();
        let written: Value = serde_json::from_slice(&request.body).unwrap();
        assert_eq!(Value::Object(Arc::unwrap_or_clone(request.fields)), written);
        assert_eq!(&request.body[request.model_range.unwrap()], b"\"m\"");
        written
    }

    #[test]
    fn names_are_removed_but_items_stay() {
        let body = |parts: Value| {
            let messages = json!([{"role": "user", "uuid": "x", "content": parts}]);
            json!({"model": "m", "uuid": "x", "messages": messages})
        };
        let url = image().to_data_url();
        for (part, expected) in [
            (
                json!({
                    "type": "image_url",
                    "image_url": {"url": "http://a", "detail": "low"},
                    "uuid": "x",
                    "z": 1,
                }),
                json!({
                    "type": "image_url",
                    "image_url": {"url": "http://a", "detail": "low"},
                    "z": 1,
                }),
            ),
            (json!({"image_url": null, "uuid": "x"}), json!({"image_url": {"url": url}})),
            (
                json!({"type": "image_url", "image_url": {"uuid": "x", "detail": "low"}}),
                json!({"type": "image_url", "image_url": {"detail": "low", "url": url}}),
            ),
            (
                json!({"type": "image_url", "uuid": "x"}),
                json!({"type": "image_url", "image_url": {"url": url}}),
            ),
            (
                json!({"type": "input_image", "uuid": "x"}),
                json!({"type": "input_image", "image_url": url}),
            ),
            (
                json!({"type": "text", "text": "uuid", "uuid": "x"}),
                json!({"type": "text", "text": "uuid"}),
            ),
            (
                json!({"type": "image_url", "image_url": "http://a", "uuid": null}),
                json!({"type": "image_url", "image_url": "http://a"}),
            ),
            (
                json!({"type": "tool_result", "content": [{"type": "image_url", "uuid": "x"}]}),
                json!({
                    "type": "tool_result",
                    "content": [{"type": "image_url", "image_url": {"url": url}}],
                }),
            ),
        ] {
            assert_eq!(
                rewritten(&body(json!(["a", part]))),
                body(json!(["a", expected])),
                "{part}"
            );
        }
    }

    #[test]
    fn names_in_responses_input_are_removed() {
        let body = |part: Value| {
            let output = json!({"type": "function_call_output", "output": [part]});
            json!({"model": "m", "input": [output]})
        };
        let named = json!({"type": "input_image", "image_url": "http://a", "uuid": "x"});
        assert_eq!(
            rewritten(&body(named)),
            body(json!({"type": "input_image", "image_url": "http://a"}))
        );
    }

    #[test]
    fn uuid_in_call_arguments_is_not_a_name() {
        let call = json!({"type": "tool_use", "name": "f", "input": {"uuid": "x"}});
        let body = json!({"model": "m", "messages": [{"role": "assistant", "content": [call]}]});
        assert!(named_parts(body.as_object().unwrap()).is_empty());
    }

    #[test]
    fn inserted_recording_has_its_format() {
        let mut part = json!({"type": "input_audio", "input_audio": null});
        let recording = EncodedMedia::new(
            b"RIFF".as_slice().into(),
            &chiasm_types::Modality::Audio,
            &Default::default(),
        );
        let part = part.as_object_mut().unwrap();
        let kind = MediaKind::find(part).unwrap();
        fill(part, kind, &recording.unwrap());
        assert_eq!(part["input_audio"], json!({"data": "UklGRg==", "format": "wav"}));
    }
}
