//! Request bodies whose images are inline and named by their identity, for servers that identify
//! media items by name.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_backend::{EncodedItem, JobItem};
use chiasm_types::Modality;
use serde_json::{Map, Result, Value};

use crate::openai::media_parts::MediaKind;

type Fields = Map<String, Value>;

/// Returns the parts of all messages, in order of appearance.
fn parts(fields: &Fields) -> impl Iterator<Item = &Fields> {
    let messages = fields.get("messages").and_then(Value::as_array).into_iter().flatten();
    let parts = messages.filter_map(|message| message.get("content")?.as_array()).flatten();
    parts.filter_map(Value::as_object)
}

fn is_image(part: &Fields) -> bool {
    MediaKind::find(part).is_some_and(|kind| kind.modality == Modality::Image)
}

/// Serializes a request with each image inline, in the bytes read here, and with the image's
/// identity as its name.
///
/// Returns `None` if an item has no encoded bytes, or if the request has another number of images.
///
/// The server must not fetch an image's URL again: the URL may return another image by then. The
/// server would reuse that image for the same name in every later request.
pub fn body_with_named_images(fields: &Fields, items: &[JobItem]) -> Option<Vec<u8>> {
    let images: Vec<(EncodedItem, String)> = items
        .iter()
        .map(|item| Some((item.source.encoded()?, item.name())))
        .collect::<Option<_>>()?;
    if parts(fields).filter(|part| is_image(part)).count() != images.len() {
        return None;
    }
    let bytes: usize = images.iter().map(|(image, _)| image.bytes.len()).sum();
    let mut out = Vec::with_capacity(bytes / 3 * 4 + (16 << 10));
    let mut images = images.iter();
    let written = write_object(&mut out, fields, |out, name, value| match value {
        Value::Array(messages) if name == "messages" => {
            write_list(out, messages, |out, message| match message {
                Value::Object(message) => {
                    write_object(out, message, |out, name, value| match value {
                        Value::Array(parts) if name == "content" => {
                            write_list(out, parts, |out, part| {
                                let image = part.as_object().filter(|part| is_image(part));
                                match image
                                    .and_then(|part| images.next().map(|image| (part, image)))
                                {
                                    Some((part, (image, name))) => {
                                        write_image(out, part, image, name)
                                    }
                                    None => serde_json::to_writer(out, part),
                                }
                            })
                        }
                        value => serde_json::to_writer(out, value),
                    })
                }
                message => serde_json::to_writer(out, message),
            })
        }
        value => serde_json::to_writer(out, value),
    });
    written.is_ok().then_some(out)
}

fn write_object(
    out: &mut Vec<u8>,
    fields: &Fields,
    mut write_value: impl FnMut(&mut Vec<u8>, &str, &Value) -> Result<()>,
) -> Result<()> {
    out.push(b'{');
    for (index, (name, value)) in fields.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        serde_json::to_writer(&mut *out, name)?;
        out.push(b':');
        write_value(out, name, value)?;
    }
    out.push(b'}');
    Ok(())
}

fn write_list(
    out: &mut Vec<u8>,
    values: &[Value],
    mut write_value: impl FnMut(&mut Vec<u8>, &Value) -> Result<()>,
) -> Result<()> {
    out.push(b'[');
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write_value(out, value)?;
    }
    out.push(b']');
    Ok(())
}

/// Writes a part with its image and name replaced. Other fields, such as `detail`, are kept.
///
/// The base64 data and the name need no escaping.
fn write_image(out: &mut Vec<u8>, part: &Fields, image: &EncodedItem, name: &str) -> Result<()> {
    const REPLACED_FIELDS: [&str; 3] = ["type", "image_url", "uuid"];
    out.extend_from_slice(br#"{"type":"image_url","image_url":{"#);
    if let Some(Value::Object(inner)) = part.get("image_url") {
        write_except(out, inner, &["url", "uuid"])?;
    }
    let EncodedItem { bytes, media_type, .. } = image;
    out.extend_from_slice(br#""url":"data:"#);
    out.extend_from_slice(media_type.as_bytes());
    out.extend_from_slice(b";base64,");
    out.extend_from_slice(STANDARD.encode(bytes).as_bytes());
    out.extend_from_slice(br#""},"#);
    write_except(out, part, &REPLACED_FIELDS)?;
    out.extend_from_slice(br#""uuid":""#);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(br#""}"#);
    Ok(())
}

/// Writes all fields except `replaced`, each followed by a comma.
fn write_except(out: &mut Vec<u8>, fields: &Fields, replaced: &[&str]) -> Result<()> {
    for (name, value) in fields.iter().filter(|(name, _)| !replaced.contains(&name.as_str())) {
        serde_json::to_writer(&mut *out, name)?;
        out.push(b':');
        serde_json::to_writer(&mut *out, value)?;
        out.push(b',');
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn other_fields_of_part_are_kept() {
        let image = EncodedItem {
            bytes: b"ab".as_slice().into(),
            content: [0; 32],
            media_type: "image/png",
            processor_kwargs: "".into(),
            url: None,
        };
        let inline = "data:image/png;base64,YWI=";
        for (part, expected) in [
            (
                json!({
                    "type": "image_url",
                    "image_url": {"url": "http://a", "detail": "low", "x": [1]},
                    "y": "\"",
                }),
                json!({
                    "type": "image_url",
                    "image_url": {"detail": "low", "x": [1], "url": inline},
                    "y": "\"",
                    "uuid": "n",
                }),
            ),
            (
                json!({"image_url": "http://a"}),
                json!({"type": "image_url", "image_url": {"url": inline}, "uuid": "n"}),
            ),
            (
                json!({"type": "input_image", "image_url": "http://a", "detail": "high"}),
                json!({
                    "type": "image_url",
                    "image_url": {"url": inline},
                    "detail": "high",
                    "uuid": "n",
                }),
            ),
        ] {
            let part = part.as_object().unwrap();
            assert!(is_image(part), "{part:?}");
            let mut written = Vec::new();
            write_image(&mut written, part, &image, "n").unwrap();
            assert_eq!(serde_json::from_slice::<Value>(&written).unwrap(), expected);
        }
    }
}
