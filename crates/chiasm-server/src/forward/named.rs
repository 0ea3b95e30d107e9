//! Conversations whose images have names of ours, for servers that know items by the names that they are given.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_backend::{EncodedItem, JobItem};
use serde_json::{Map, Result, Value};

type Fields = Map<String, Value>;

/// Whether a part of a conversation has a name for its media item. A server takes two items of one name for one, so names of clients must
/// not get there: anybody can give another item the same one.
pub(super) fn has_names(fields: &Fields) -> bool {
    ["messages", "input"].iter().flat_map(|list| parts_of(fields, list)).filter_map(Value::as_object).any(|part| {
        let mut within = part.values().filter_map(Value::as_object);
        part.contains_key("uuid") || within.any(|field| field.contains_key("uuid"))
    })
}

/// The parts of all messages, in order of appearance.
fn parts(fields: &Fields) -> impl Iterator<Item = &Value> {
    parts_of(fields, "messages")
}

fn parts_of<'a>(fields: &'a Fields, list: &str) -> impl Iterator<Item = &'a Value> {
    let messages = fields.get(list).and_then(Value::as_array).into_iter().flatten();
    messages.filter_map(|message| message.get("content")?.as_array()).flatten()
}

/// Where the images of all messages are, in order of appearance.
pub(super) fn image_urls(fields: &Fields) -> impl Iterator<Item = &str> {
    parts(fields).filter(|part| is_image(part)).map(|part| {
        let url = part.get("image_url");
        url.and_then(|url| url.as_str().or_else(|| url.get("url")?.as_str())).unwrap_or_default()
    })
}

fn is_image(part: &Value) -> bool {
    part.get("type").and_then(Value::as_str).is_some_and(|kind| matches!(kind, "image_url" | "input_image"))
}

/// A request's body in which each image stands as it was read here, under its identity, in order of appearance. `None` if there are others
/// than these.
///
/// One that has a URL is not left to be fetched again: there may be another image by then, which would be taken for this one from then on,
/// whoever asks.
pub(super) fn named(fields: &Fields, items: &[JobItem]) -> Option<Vec<u8>> {
    let images: Vec<(EncodedItem, String)> =
        items.iter().map(|item| Some((item.source.encoded()?, item.name()))).collect::<Option<_>>()?;
    if parts(fields).filter(|part| is_image(part)).count() != images.len() {
        return None;
    }
    let bytes: usize = images.iter().map(|(image, _)| image.bytes.len()).sum();
    let mut out = Vec::with_capacity(bytes / 3 * 4 + (16 << 10));
    let mut images = images.iter();
    let written = write_object(&mut out, fields, |out, name, value| match value {
        Value::Array(messages) if name == "messages" => write_list(out, messages, |out, message| match message {
            Value::Object(message) => write_object(out, message, |out, name, value| match value {
                Value::Array(parts) if name == "content" => {
                    write_list(out, parts, |out, part| match is_image(part).then(|| images.next()).flatten() {
                        Some((image, name)) => write_image(out, image, name),
                        None => serde_json::to_writer(out, part),
                    })
                }
                value => serde_json::to_writer(out, value),
            }),
            message => serde_json::to_writer(out, message),
        }),
        value => serde_json::to_writer(out, value),
    });
    written.is_ok().then_some(out)
}

fn write_object(
    out: &mut Vec<u8>,
    fields: &Fields,
    mut write: impl FnMut(&mut Vec<u8>, &str, &Value) -> Result<()>,
) -> Result<()> {
    out.push(b'{');
    for (at, (name, value)) in fields.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        serde_json::to_writer(&mut *out, name)?;
        out.push(b':');
        write(out, name, value)?;
    }
    out.push(b'}');
    Ok(())
}

fn write_list(
    out: &mut Vec<u8>,
    values: &[Value],
    mut write: impl FnMut(&mut Vec<u8>, &Value) -> Result<()>,
) -> Result<()> {
    out.push(b'[');
    for (at, value) in values.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write(out, value)?;
    }
    out.push(b']');
    Ok(())
}

/// A part that stands for an image. Nothing of what is written has to be escaped.
fn write_image(out: &mut Vec<u8>, image: &EncodedItem, name: &str) -> Result<()> {
    let EncodedItem { bytes, media_type, .. } = image;
    out.extend_from_slice(br#"{"type":"image_url","image_url":{"url":"data:"#);
    out.extend_from_slice(media_type.as_bytes());
    out.extend_from_slice(b";base64,");
    out.extend_from_slice(STANDARD.encode(bytes).as_bytes());
    out.extend_from_slice(br#""},"uuid":""#);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(br#""}"#);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(body: Value) -> Fields {
        body.as_object().unwrap().clone()
    }

    #[test]
    fn names_of_clients_are_found_wherever_a_server_would_look_for_them() {
        let part = |part: Value| json!([{"role": "user", "content": [{"type": "text", "text": "uuid"}, part]}]);
        let image = json!({"type": "image_url", "image_url": {"url": "http://a"}});
        assert!(!has_names(&of(json!({"messages": part(image), "uuid": "x", "user": {"uuid": "x"}}))));
        for named in [
            json!({"type": "image_url", "image_url": {"url": "http://a"}, "uuid": "x"}),
            json!({"type": "video_url", "video_url": {"url": "http://a", "uuid": "x"}}),
            json!({"type": "image_url", "image_url": null, "uuid": null}),
        ] {
            assert!(has_names(&of(json!({"messages": part(named.clone())}))), "{named}");
            assert!(has_names(&of(json!({"input": part(named.clone())}))), "{named}");
        }
        assert!(!has_names(&of(json!({"messages": "x", "input": [{"content": "uuid"}, 7]}))));
    }
}
