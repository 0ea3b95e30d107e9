//! Selects the model served here from a server's list.

use serde::Deserialize;

/// The maximum number of listed names in an error, since a server may list anything.
const MAX_SHOWN_NAMES: usize = 5;
/// The maximum number of characters of each name.
const MAX_NAME_CHARS: usize = 100;

/// The possible names of the model served here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    /// The server's name of the model, from the operator.
    pub(crate) configured: Option<String>,
    /// The local names: the name that clients use and the one on the command line.
    pub(crate) local: Vec<String>,
}

/// The body of `/v1/models`.
#[derive(Deserialize)]
pub(crate) struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    max_model_len: Option<usize>,
    /// The base model of an adapter.
    parent: Option<String>,
    /// The source of the model in vLLM: the name that vLLM was started with.
    root: Option<String>,
    /// The name of the server's software, in vLLM, SGLang and TensorRT-LLM.
    owned_by: Option<String>,
}

/// The model of a server that gets this frontend's requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServedModel {
    /// The server's name of the model.
    pub(crate) name: String,
    /// The maximum number of tokens of prompt and answer together, if reported.
    pub(crate) max_model_len: Option<usize>,
    /// `true` if the name is a local name or the operator's, or if there are no local names.
    pub(crate) is_expected: bool,
}

/// An error of selecting a model from a server's list.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ModelError {
    /// The operator has named a model that the server does not list.
    #[error("it does not serve model={name}; it serves {listed}")]
    Missing { name: String, listed: String },
    /// Several models are listed and none has a known name.
    #[error(
        "it serves {listed}, none of them named {}; choose one with model=NAME after the address",
        local.join(" or ")
    )]
    Ambiguous { local: Vec<String>, listed: String },
    /// The server does not report the maximum number of tokens of prompt and answer together.
    #[error("it does not report its model's context (max_model_len of /v1/models)")]
    NoContext,
}

impl Models {
    /// Selects the model; `None` if the server lists none.
    ///
    /// If a server lists one model, it is selected whatever its name, because many servers have a
    /// name of their own for a model.
    ///
    /// # Errors
    /// Returns [`ModelError`] if the model is missing or several models could be meant.
    pub(crate) fn find(&self, names: &Names) -> Result<Option<ServedModel>, ModelError> {
        if let Some(name) = &names.configured {
            let found = self.data.iter().find(|model| model.id == *name);
            let missing = || ModelError::Missing { name: name.clone(), listed: self.listed() };
            return found.map(|model| Some(model.to_served(true))).ok_or_else(missing);
        }
        let bases = || self.data.iter().filter(|model| model.parent.is_none());
        let has_local_name = |model: &&Model, matches: fn(&str, &str) -> bool| {
            let own = [Some(&model.id), model.root.as_ref()];
            own.into_iter().flatten().any(|own| names.local.iter().any(|local| matches(own, local)))
        };
        let exact = bases().find(|model| has_local_name(model, |own, local| own == local));
        if let Some(model) =
            exact.or_else(|| bases().find(|model| has_local_name(model, same_last_component)))
        {
            return Ok(Some(model.to_served(true)));
        }
        let mut bases = bases();
        match (bases.next(), bases.next()) {
            (None, _) => Ok(None),
            (Some(only), None) => Ok(Some(only.to_served(names.local.is_empty()))),
            _ => Err(ModelError::Ambiguous { local: names.local.clone(), listed: self.listed() }),
        }
    }

    /// Selects the model of a server that has to report its context, and returns both.
    ///
    /// # Errors
    /// Returns [`ModelError`] if there is no such model or its context is not reported.
    pub(crate) fn find_with_context(
        &self,
        names: &Names,
    ) -> Result<(ServedModel, usize), ModelError> {
        let found = self
            .find(names)?
            .and_then(|found| found.max_model_len.map(|max_model_len| (found, max_model_len)));
        found.ok_or(ModelError::NoContext)
    }

    /// Returns the name of the server's software, if the server states one.
    pub(crate) fn software(&self) -> Option<&str> {
        self.data.first()?.owned_by.as_deref()
    }

    fn listed(&self) -> String {
        let names: Vec<_> =
            self.data.iter().take(MAX_SHOWN_NAMES).map(|model| truncated(&model.id)).collect();
        let more = if self.data.len() > MAX_SHOWN_NAMES { " and others" } else { "" };
        if names.is_empty() {
            "no models".to_owned()
        } else {
            format!("{}{more}", names.join(", "))
        }
    }
}

impl Model {
    fn to_served(&self, is_expected: bool) -> ServedModel {
        ServedModel { name: self.id.clone(), max_model_len: self.max_model_len, is_expected }
    }
}

/// Returns the beginning of a server's name of a model, for logs and errors.
pub(crate) fn truncated(name: &str) -> String {
    name.chars().take(MAX_NAME_CHARS).collect()
}

/// Returns `true` if the last components of two names are equal, as for one model in a folder and
/// on the hub.
fn same_last_component(first: &str, second: &str) -> bool {
    let last = |name: &str| {
        name.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_ascii_lowercase()
    };
    last(first) == last(second)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn find(ids: &[&str], configured: Option<&str>) -> Result<Option<(String, bool)>, ModelError> {
        let data: Vec<_> = ids.iter().map(|id| json!({"id": id})).collect();
        let models: Models = serde_json::from_value(json!({ "data": data })).unwrap();
        let local = ["m", "Qwen/Qwen2.5-VL-7B-Instruct"].map(str::to_owned).to_vec();
        let found = models.find(&Names { configured: configured.map(str::to_owned), local })?;
        Ok(found.map(|found| (found.name, found.is_expected)))
    }

    #[test]
    fn model_is_selected_by_name() {
        let is = |name: &str, is_expected| Ok(Some((name.to_owned(), is_expected)));
        assert_eq!(find(&["other", "m"], None), is("m", true));
        assert_eq!(
            find(&["other", "Qwen/Qwen2.5-VL-7B-Instruct"], None),
            is("Qwen/Qwen2.5-VL-7B-Instruct", true)
        );
        assert_eq!(
            find(&["other", "/models/qwen2.5-vl-7b-instruct/"], None),
            is("/models/qwen2.5-vl-7b-instruct/", true)
        );
        assert_eq!(find(&["m", "other"], Some("other")), is("other", true));
        assert_eq!(find(&["other"], None), is("other", false), "the only model is selected");
        assert_eq!(find(&[], None), Ok(None));
    }

    #[test]
    fn server_without_the_model_is_refused() {
        let error = find(&["a", "b", "c", "d", "e", "f"], None).unwrap_err().to_string();
        assert!(
            error.contains("named m or Qwen/") && error.contains("a, b, c, d, e and others"),
            "{error}"
        );
        let error = find(&["m", &"long".repeat(100)], Some("n")).unwrap_err().to_string();
        assert!(
            error.contains("model=n;") && error.contains("serves m, long") && error.len() < 200,
            "{error}"
        );
        assert!(find(&[], Some("n")).unwrap_err().to_string().contains("no models"));
    }

    #[test]
    fn base_model_is_selected_by_its_root() {
        let models = json!({"data": [
            {"id": "adapter", "parent": "theirs", "root": "/adapters/m"},
            {"id": "theirs", "root": "Qwen/Qwen2.5-VL-7B-Instruct", "max_model_len": 9},
            {"id": "other"},
        ]});
        let models: Models = serde_json::from_value(models).unwrap();
        let local = vec!["Qwen/Qwen2.5-VL-7B-Instruct".to_owned()];
        let names = Names { configured: None, local };
        let expected =
            ServedModel { name: "theirs".to_owned(), max_model_len: Some(9), is_expected: true };
        assert_eq!(models.find(&names), Ok(Some(expected)));
    }
}
