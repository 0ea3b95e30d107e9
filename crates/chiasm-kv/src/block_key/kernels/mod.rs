//! Keys of many blocks at a time by vector code, and the one place that chooses among its
//! implementations.
//!
//! All of them do what [`Secret::extend_each`] does block by block, their scalar reference, and
//! must equal it bit for bit.
//!
//! | module | for |
//! |---|---|
//! | `avx512` | x86-64 with AVX-512 F and IFMA: Intel since Ice Lake, AMD since Zen 4 |
//!
//! [`Secret::extend_each`]: super::universal::Secret::extend_each

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::sync::LazyLock;

use chiasm_types::TokenId;

use super::BlockKey;
use super::field::multiply_add;

/// Words of tokens in a block, at most, of which keys are made here.
pub(super) const WORDS: usize = 64;

/// Blocks that follow each other and are alike but for their tokens, and for one number that grows
/// from block to block.
#[derive(Clone, Copy)]
pub(super) struct Series<'a> {
    /// The state before the first block, below p.
    pub(super) state: u128,
    /// What all words of the first block but its tokens add to its sum, below p.
    pub(super) first: u128,
    /// What `first` grows by from each block to the next, below p.
    pub(super) step: u128,
    /// The tokens of full blocks only.
    pub(super) tokens: &'a [TokenId],
    /// Tokens, from 1 to twice [`WORDS`].
    pub(super) block_size: usize,
}

impl Series<'_> {
    /// Takes away the blocks that have these keys.
    pub(super) fn skip(&mut self, keys: &[BlockKey]) {
        let Some(last) = keys.last() else { return };
        self.state = last.0;
        self.first = multiply_add(self.step, keys.len() as u128, self.first);
        self.tokens = &self.tokens[keys.len() * self.block_size..];
    }
}

/// One implementation that this CPU can run.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    #[cfg(test)]
    pub(super) name: &'static str,
    /// May need CPU features; [`supported`] alone hands it out, where it found them.
    extend: unsafe fn(&Tables, &Series<'_>, &mut Vec<BlockKey>),
}

impl Kernel {
    /// Appends the keys of the leading blocks: of all, or up to one that has larger tokens than the
    /// implementation takes, or some blocks before that.
    pub(super) fn extend(self, tables: &Tables, series: &Series<'_>, keys: &mut Vec<BlockKey>) {
        // SAFETY: a kernel is only handed out where the CPU has its features.
        unsafe { (self.extend)(tables, series, keys) }
    }

    /// The fastest.
    pub(super) fn fastest() -> Option<Self> {
        SUPPORTED.last().copied()
    }
}

/// The secret in the forms that the implementations want.
pub(super) struct Tables {
    #[cfg(target_arch = "x86_64")]
    avx512: avx512::Table,
}

impl Tables {
    /// Prepares the coefficients of the first words of tokens, and a point other than 0; all below
    /// p.
    #[allow(unused_variables, reason = "where there is no vector code")]
    pub(super) fn new(coefficients: &[u128; WORDS], point: u128) -> Self {
        Self {
            #[cfg(target_arch = "x86_64")]
            avx512: avx512::Table::new(coefficients, point),
        }
    }
}

static SUPPORTED: LazyLock<Vec<Kernel>> = LazyLock::new(supported);

/// The kernels that this CPU can run, the fastest last.
pub(super) fn supported() -> Vec<Kernel> {
    #[allow(unused_mut, reason = "on other architectures nothing is added")]
    let mut supported = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx512f") && has!("avx512ifma") {
            supported.push(Kernel {
                #[cfg(test)]
                name: "avx512",
                extend: avx512::extend,
            });
        }
    }
    supported
}

#[cfg(test)]
mod tests;
