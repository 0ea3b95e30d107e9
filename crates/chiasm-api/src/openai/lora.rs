//! Bodies of the endpoints that load and unload LoRA adapters, as vLLM has them.

use chiasm_media::Charge;
use serde_json::Value;

use super::fields::Fields;
use super::intake::Intake;
use super::request::RequestBody;
use crate::error::ApiError;

/// The longest name and path.
const MAX_BYTES: usize = 4096;

/// An adapter that is to be loaded.
pub struct LoadRequest {
    /// The name in requests.
    pub name: String,
    /// Its folder.
    pub path: String,
    /// It takes the place of an adapter of this name.
    pub in_place: bool,
}

impl RequestBody for LoadRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let mut fields = Fields::new(intake.read::<Value>()?, "")?;
        let (name, path) =
            (take_text(&mut fields, "lora_name")?, take_text(&mut fields, "lora_path")?);
        fields.refuse_unless("is_3d_lora_weight", |value| value.as_bool() == Some(false))?;
        let in_place = fields.take("load_inplace")?.unwrap_or(false);
        fields.finish()?;
        Ok((Self { name, path, in_place }, intake.into_charge()))
    }
}

/// An adapter that is not to be served any more.
pub struct UnloadRequest {
    /// The name in requests.
    pub name: String,
}

impl RequestBody for UnloadRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let mut fields = Fields::new(intake.read::<Value>()?, "")?;
        let name = take_text(&mut fields, "lora_name")?;
        // vLLM knows adapters by their names too, and does not look at it.
        fields.ignore(&["lora_int_id"]);
        fields.finish()?;
        Ok((Self { name }, intake.into_charge()))
    }
}

fn take_text(fields: &mut Fields, name: &str) -> Result<String, ApiError> {
    let text: String = fields.take(name)?.ok_or_else(|| ApiError::missing(name))?;
    if text.is_empty() || text.len() > MAX_BYTES || text.contains('\0') {
        return Err(ApiError::invalid(
            name,
            format!("'{name}' must have from 1 to {MAX_BYTES} bytes, none of them 0"),
        ));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_adapter_has_name_and_path() {
        let parse = |body: Value| LoadRequest::parse(Intake::of(&body)).map(|(request, _)| request);
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
    fn the_id_of_an_adapter_that_goes_is_not_looked_at() {
        let (request, _) =
            UnloadRequest::parse(Intake::of(&json!({"lora_name": "a", "lora_int_id": 3}))).unwrap();
        assert_eq!(request.name, "a");
        assert!(UnloadRequest::parse(Intake::of(&json!({}))).is_err());
    }
}
