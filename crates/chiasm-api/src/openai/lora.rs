//! The bodies of the endpoints that load and unload LoRA adapters, in vLLM's format.

use chiasm_media::Charge;
use serde_json::Value;

use super::fields::Fields;
use super::intake::Intake;
use super::request::RequestBody;
use crate::error::ApiError;

/// The maximum length of a name or a path.
const MAX_TEXT_BYTES: usize = 4096;

/// A request to load an adapter.
pub struct LoadRequest {
    /// The adapter's name in requests.
    pub name: String,
    /// The adapter's folder.
    pub path: String,
    /// `true` if the adapter replaces a loaded adapter of the same name.
    pub in_place: bool,
}

impl RequestBody for LoadRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let mut fields = Fields::new(intake.read::<Value>()?, "")?;
        let name = take_text(&mut fields, "lora_name")?;
        let path = take_text(&mut fields, "lora_path")?;
        fields.refuse_unless("is_3d_lora_weight", |value| value.as_bool() == Some(false))?;
        let in_place = fields.take("load_inplace")?.unwrap_or(false);
        fields.finish()?;
        Ok((Self { name, path, in_place }, intake.into_charge()))
    }
}

/// A request to unload an adapter.
pub struct UnloadRequest {
    /// The adapter's name in requests.
    pub name: String,
}

impl RequestBody for UnloadRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let mut fields = Fields::new(intake.read::<Value>()?, "")?;
        let name = take_text(&mut fields, "lora_name")?;
        // vLLM also identifies adapters by name and ignores this id.
        fields.ignore(&["lora_int_id"]);
        fields.finish()?;
        Ok((Self { name }, intake.into_charge()))
    }
}

fn take_text(fields: &mut Fields, name: &'static str) -> Result<String, ApiError> {
    let text: String = fields.take(name)?.ok_or_else(|| ApiError::missing(name))?;
    if text.is_empty() || text.len() > MAX_TEXT_BYTES || text.contains('\0') {
        return Err(ApiError::invalid(
            name,
            format!("'{name}' must have from 1 to {MAX_TEXT_BYTES} bytes, none of them 0"),
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn load_request_fields_are_checked() {
        let parse =
            |body: Value| LoadRequest::parse(Intake::from_json(&body)).map(|(request, _)| request);
        let request =
            parse(json!({"lora_name": "a", "lora_path": "/x", "load_inplace": true})).unwrap();
        assert!(request.in_place);
        assert_eq!((request.name.as_str(), request.path.as_str()), ("a", "/x"));
        for (body, param) in [
            (json!({"lora_path": "/x"}), "lora_name"),
            (json!({"lora_name": "a"}), "lora_path"),
            (json!({"lora_name": "", "lora_path": "/x"}), "lora_name"),
            (json!({"lora_name": "a", "lora_path": "\0"}), "lora_path"),
            (json!({"lora_name": "a", "lora_path": 1}), "lora_path"),
            (json!({"lora_name": "a", "lora_path": "/x", "rank": 8}), "rank"),
            (
                json!({"lora_name": "a", "lora_path": "/x", "is_3d_lora_weight": true}),
                "is_3d_lora_weight",
            ),
            (json!([]), "body"),
        ] {
            assert_eq!(
                parse(body.clone()).err().and_then(|error| error.param).as_deref(),
                Some(param),
                "{body}"
            );
        }
    }

    #[test]
    fn unload_request_ignores_adapter_id() {
        let (request, _) =
            UnloadRequest::parse(Intake::from_json(&json!({"lora_name": "a", "lora_int_id": 3})))
                .unwrap();
        assert_eq!(request.name, "a");
        assert!(UnloadRequest::parse(Intake::from_json(&json!({}))).is_err());
    }
}
