//! Media parts to bytes, identity, size and pixels.
//!
//! A chat request names its images by `data:`, `http(s):` or `file:` URL. [`MediaDoor::open`] turns such a URL into an
//! [`EncodedImage`]: the file's bytes, their [`ContentHash`], and what the header says about size and orientation. That
//! is all that planning, hashing and routing need. [`with_pixels`] and [`decode`] make pixels of it, and only of images
//! that an engine lacks.
//!
//! The pixels are those that vLLM 0.32 feeds to a model's processor, bit for bit: Pillow's decoders, EXIF orientation
//! applied, transparency flattened onto white, other modes converted as `convert("RGB")` does. PNG, JPEG, WebP, GIF (first
//! frame) and BMP are read; anything else is [`Fault::Unsupported`]. Where Pillow raises an error, so does this crate;
//! where vLLM goes on with half an image after such an error, this crate still returns it (see [`decode`]).
//!
//! ```
//! use chiasm_media::{EncodedImage, ImageFormat, decode, mm_hash};
//!
//! // A GIF of one black pixel.
//! let file: &[u8] = b"GIF87a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;";
//! let image = EncodedImage::from_bytes(file.into(), 1_000_000)?;
//! assert_eq!((image.format, image.width, image.height), (ImageFormat::Gif, 1, 1));
//! assert_eq!(decode(&image)?.pixels, [0, 0, 0]);
//! assert_eq!(mm_hash(&image.content, "image", b"settings").to_string().len(), 64);
//! # Ok::<(), chiasm_media::MediaError>(())
//! ```
//!
//! | module | is about |
//! |---|---|
//! | `door` | one way in for whatever names a media item |
//! | `config` | limits and permissions |
//! | `budget` | bytes in memory, counted and bounded |
//! | `data_uri`, `fetch`, `local_file` | the three kinds of URL |
//! | `flight` | one piece of work for all who want the same |
//! | `contents`, `names` | what was seen before: files by content; URLs and clients' names |
//! | `counts` | what has happened, in numbers |
//! | `policy/*` | which URLs and network addresses may be fetched |
//! | `freshness/*` | for how long an answer may be reused |
//! | `image`, `identity` | what is known without decoding |
//! | `limits` | how large an image may be, by its header |
//! | `probe`, `container/*`, `exif` | headers: format, size, orientation |
//! | `other_format` | names of what is not read |
//! | `decode`, `decode/*` | pixels |
//! | `error` | what went wrong and whose fault it is |
#![forbid(unsafe_code)]

mod budget;
mod config;
mod container;
mod contents;
mod counts;
mod data_uri;
mod decode;
mod door;
mod error;
mod exif;
mod fetch;
mod flight;
mod freshness;
#[doc(hidden)]
pub mod fuzzing;
mod identity;
mod image;
mod limits;
mod local_file;
mod names;
mod other_format;
mod policy;
mod probe;
mod reader;

pub use budget::{ByteBudget, Charge, ChargedBuffer};
pub use config::MediaConfig;
pub use counts::MediaCounts;
pub use decode::{DecodeMemory, caught_panics, decode, decode_into, with_pixels};
pub use door::{MediaDoor, MediaPart};
pub use error::{Fault, MediaError};
pub use identity::{ContentHash, mm_hash};
pub use image::{EncodedImage, ImageFormat, RgbImage, RgbPixels};
pub use limits::ImageLimits;
pub use names::MediaName;
pub use policy::DomainRule;
