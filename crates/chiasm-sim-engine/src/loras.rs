//! LoRA adapters, kept like in `LRUCacheWorkerLoRAManager` of `vllm/lora/worker_manager.py`.

use std::fs;
use std::path::Path;

use chiasm_engine::wire::LoraRequest;

use crate::config::LoraLimits;

/// An error of reading an adapter, with vLLM's message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoraReadError {
    #[error("Loading lora {name} failed: No adapter found for {path}")]
    NotFound { name: String, path: String },
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("Missing required configuration fields: {{'r'}}")]
    NoRank,
    #[error("LoRA rank {rank} is greater than max_lora_rank {max_rank}.")]
    Rank { rank: u64, max_rank: u64 },
}

/// The loaded adapters.
#[derive(Debug)]
pub(crate) struct Loras {
    limits: LoraLimits,
    /// The adapters, least recently used first.
    loaded: Vec<LoraRequest>,
}

impl Loras {
    pub(crate) fn new(limits: LoraLimits) -> Self {
        Self { limits, loaded: Vec::new() }
    }

    /// Marks an adapter as used, and reads it if it is not loaded. A loaded id is not read again.
    ///
    /// # Errors
    ///
    /// Returns vLLM's error for an adapter that can't be read.
    pub(crate) fn touch(&mut self, lora: &LoraRequest) -> Result<(), LoraReadError> {
        if let Some(index) = self.loaded.iter().position(|loaded| loaded.id == lora.id) {
            let loaded = self.loaded.remove(index);
            self.loaded.push(loaded);
            return Ok(());
        }
        self.check(lora)?;
        if self.loaded.len() == self.limits.max_cpu_loras.max(1) {
            self.loaded.remove(0);
        }
        self.loaded.push(lora.clone());
        Ok(())
    }

    /// Removes an adapter. Returns `true` if it was loaded.
    pub(crate) fn remove(&mut self, id: u64) -> bool {
        let before = self.loaded.len();
        self.loaded.retain(|loaded| u64::from(loaded.id) != id);
        self.loaded.len() < before
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = u32> {
        self.loaded.iter().map(|loaded| loaded.id)
    }

    fn check(&self, LoraRequest { name, path, .. }: &LoraRequest) -> Result<(), LoraReadError> {
        let config = fs::read(Path::new(path).join("adapter_config.json"))
            .map_err(|_| LoraReadError::NotFound { name: name.clone(), path: path.clone() })?;
        let config: serde_json::Value = serde_json::from_slice(&config)?;
        let rank = config["r"].as_u64().ok_or(LoraReadError::NoRank)?;
        let max_rank = self.limits.max_rank;
        if rank > max_rank {
            return Err(LoraReadError::Rank { rank, max_rank });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_adapter_is_evicted() {
        let dir = std::env::temp_dir().join(format!("chiasm-loras-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("adapter_config.json"), r#"{"r": 8}"#).unwrap();
        let path = dir.display().to_string();
        let lora = |id| LoraRequest { name: format!("a{id}"), id, path: path.clone() };
        let mut loras = Loras::new(LoraLimits { max_cpu_loras: 2, ..LoraLimits::default() });
        for id in [1, 2, 1, 3] {
            loras.touch(&lora(id)).unwrap();
        }
        assert_eq!(loras.ids().collect::<Vec<_>>(), [1, 3]);
        assert!(loras.remove(1) && !loras.remove(1));
        fs::write(dir.join("adapter_config.json"), r#"{"r": 32}"#).unwrap();
        loras.touch(&lora(3)).unwrap();
        assert_eq!(
            loras.touch(&lora(4)).unwrap_err().to_string(),
            "LoRA rank 32 is greater than max_lora_rank 16."
        );
        fs::remove_dir_all(&dir).unwrap();
        let missing = loras.touch(&lora(5)).unwrap_err().to_string();
        assert!(missing.starts_with("Loading lora a5 failed: No adapter found for "), "{missing}");
    }
}
