"""Tiny configurations of the transformers architectures that tools/zoo.py compiles and verifies.

Every entry is a name, a configuration class, a model class, the settings that make it tiny, and inputs with labels, so
that the model gives its loss. Sizes are odd where the architecture allows (batch 6, vocabulary 101, inner widths 37 or
41): on a 2x2 mesh no dim divides evenly. Dropout, layer drop and stochastic depth are off; parameters are moved away
from their initial values, so that no bias is 0 and no scale 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fxpar.model_source import OPTIMIZERS, ModelSource, default_loss

BATCH, SEQ, TARGET, VOCAB, CLASSES, IGNORED = 6, 10, 7, 101, 5, -100
PARAMETER_NOISE = 0.05

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One line of the zoo.

    Attributes:
        name: as transformers names the folder of the model.
        family: decoder, encoder, encoder-decoder, vision, speech or multimodal.
        configuration, model: names of classes in transformers.
        settings: of the configuration; a value ``(class name, settings)`` is a configuration in it.
        inputs: the global batch, as keyword arguments.
        loss: from the model's output and its inputs; the loss in the output unless the model's own cannot be traced.
    """

    name: str
    family: str
    configuration: str
    model: str
    settings: Mapping[str, Any]
    inputs: Callable[[], Batch]
    loss: Callable[[Any, Any], torch.Tensor] = default_loss


def source_of(architecture: Architecture) -> ModelSource:
    """The architecture as something to compile."""
    def build() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        configuration = without_dropout(configured(architecture.configuration, architecture.settings))
        model: nn.Module = getattr(transformers, architecture.model)(configuration)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += PARAMETER_NOISE * torch.randn_like(parameter)
        return model.train()

    return ModelSource(
        name=architecture.name,
        build=build,
        example_inputs=lambda: ((), architecture.inputs()),
        loss=architecture.loss,
        optimizer=OPTIMIZERS["adamw"],
    )


def configured(name: str, settings: Mapping[str, Any]) -> Any:
    """A configuration, and those in it."""
    import transformers

    given = {
        key: configured(*value) if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) else value
        for key, value in settings.items()
    }
    return getattr(transformers, name)(**given)


def without_dropout(configuration: Any) -> Any:
    """The same configuration with every rate of dropout, layer drop and stochastic depth 0."""
    for key, value in vars(configuration).items():
        if hasattr(value, "model_type"):
            without_dropout(value)
        elif isinstance(value, float) and any(word in key for word in ("drop", "pdrop")):
            setattr(configuration, key, 0.0)
    return configuration


# --- inputs --------------------------------------------------------------------------------------------------------


def numbers(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def tokens(length: int = SEQ, seed: int = 1) -> torch.Tensor:
    """Ids [BATCH, length] above those of special tokens."""
    return torch.randint(4, VOCAB, (BATCH, length), generator=numbers(seed))


def padding(length: int = SEQ) -> torch.Tensor:
    """An attention mask [BATCH, length]: sample 3 ends after half, sample 1 one token early."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[3, length // 2 :] = 0
    mask[1, -1] = 0
    return mask


def causal() -> Batch:
    ids, mask = tokens(), padding()
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[0, :4] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def unmasked_causal() -> Batch:
    return {"input_ids": tokens(), "labels": tokens()}


def masked() -> Batch:
    ids, mask = tokens(), padding()
    labels = torch.where(torch.rand(ids.shape, generator=numbers(2)) < 0.3, ids, IGNORED)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def layout() -> Batch:
    corners = torch.randint(0, 20, (BATCH, SEQ, 4), generator=numbers(3))
    corners[..., 2:] += corners[..., :2]
    return {**masked(), "bbox": corners}


def unmasked() -> Batch:
    return {key: value for key, value in masked().items() if key != "attention_mask"}


def seq2seq() -> Batch:
    labels = tokens(TARGET, seed=4)
    labels[1, 4:] = IGNORED
    return {"input_ids": tokens(), "attention_mask": padding(), "labels": labels}


def seq2seq_without_ignored() -> Batch:
    return {**seq2seq(), "labels": tokens(TARGET, seed=4)}


def pixels(size: int) -> torch.Tensor:
    images = torch.randn(BATCH, 3, size, size, generator=numbers(5))
    images[4:] += 1.0
    return images


def classes() -> torch.Tensor:
    return torch.randint(0, CLASSES, (BATCH,), generator=numbers(6))


def images(size: int) -> Callable[[], Batch]:
    return lambda: {"pixel_values": pixels(size), "labels": classes()}


def wave(samples: int = 400) -> Callable[[], Batch]:
    return lambda: {"input_values": torch.randn(BATCH, samples, generator=numbers(7)), "labels": classes()}


def unlabelled_wave() -> Batch:
    return {"input_values": torch.randn(BATCH, 400, generator=numbers(7))}


def ctc_loss(output: Any, inputs: Any) -> torch.Tensor:
    """The loss of transformers' CTC heads, which look at the labels' values first (`if labels.max() >= ...`)."""
    scores = nn.functional.log_softmax(output.logits, dim=-1).transpose(0, 1)
    targets = (torch.arange(BATCH * 4).reshape(BATCH, 4) * 7) % (VOCAB - 1) + 1
    return nn.functional.ctc_loss(scores, targets, (scores.shape[0],) * BATCH, (4, 3, 4, 2, 1, 4))


def spectrogram() -> Batch:
    return {"input_features": torch.randn(BATCH, 10, 40, generator=numbers(9)), "labels": tokens(TARGET, seed=4)}


def spectrogram_frames() -> Batch:
    return {"input_features": torch.randn(BATCH, 40, 10, generator=numbers(9)), "labels": tokens(TARGET, seed=4)}


def spectrogram_class() -> Batch:
    return {"input_values": torch.randn(BATCH, 24, 16, generator=numbers(9)), "labels": classes()}


def contrastive(size: int) -> Callable[[], Batch]:
    return lambda: {"input_ids": tokens(), "attention_mask": padding(), "pixel_values": pixels(size),
                    "return_loss": True}


def captioned(size: int, placeholders: int) -> Callable[[], Batch]:
    """Text that begins with a placeholder (id 3) for every patch of the image."""
    def inputs() -> Batch:
        ids = tokens(placeholders + 6)
        ids[:, 1 : 1 + placeholders] = 3
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels(size),
                "labels": ids.masked_fill(ids == 3, IGNORED)}

    return inputs


def question(size: int) -> Callable[[], Batch]:
    return lambda: {"input_ids": tokens(), "attention_mask": padding(), "pixel_values": pixels(size),
                    "labels": torch.rand(BATCH, CLASSES, generator=numbers(10))}


def caption(size: int) -> Callable[[], Batch]:
    return lambda: {**causal(), "pixel_values": pixels(size)}


# --- settings ------------------------------------------------------------------------------------------------------

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False,
           **SPECIAL}
# the grouped matmul of experts takes widths of whole 16 bytes
EXPERTS = {**DECODER, "intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2}
ENCODER = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
           "intermediate_size": 41, "max_position_embeddings": 32, "type_vocab_size": 2, **SPECIAL}
SEQ2SEQ = {"vocab_size": VOCAB, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 41, "max_position_embeddings": 32,
           "use_cache": False, "decoder_start_token_id": 2, "forced_eos_token_id": None, **SPECIAL}
T5 = {"vocab_size": VOCAB, "d_model": 24, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 3,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "use_cache": False,
      "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37, "image_size": 12,
       "patch_size": 4, "num_labels": CLASSES}
PYRAMID = {"depths": [1, 2], "num_labels": CLASSES}
WAVE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37,
        "conv_dim": (10, 12, 14), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 5, "num_conv_pos_embedding_groups": 3, "apply_spec_augment": False,
        "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "num_labels": CLASSES, "classifier_proj_size": 13,
        "vocab_size": VOCAB, **SPECIAL}
TEXT = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 3, "max_position_embeddings": 16, **SPECIAL}
VISION = {"hidden_size": 24, "intermediate_size": 41, "num_hidden_layers": 2, "num_attention_heads": 4,
          "image_size": 12, "patch_size": 4}


def decoder(name: str, cls: str, inputs: Callable[[], Batch] = causal, base: Mapping[str, Any] = DECODER,
            model: str = "", **more: Any) -> Architecture:
    return Architecture(name, "decoder", f"{cls}Config", model or f"{cls}ForCausalLM", {**base, **more}, inputs)


def encoder(name: str, cls: str, inputs: Callable[[], Batch] = masked, base: Mapping[str, Any] = ENCODER,
            **more: Any) -> Architecture:
    return Architecture(name, "encoder", f"{cls}Config", f"{cls}ForMaskedLM", {**base, **more}, inputs)


def translator(name: str, cls: str, inputs: Callable[[], Batch] = seq2seq, base: Mapping[str, Any] = SEQ2SEQ,
               model: str = "", **more: Any) -> Architecture:
    return Architecture(name, "encoder-decoder", f"{cls}Config", model or f"{cls}ForConditionalGeneration",
                        {**base, **more}, inputs)


def vision(name: str, cls: str, size: int = 12, base: Mapping[str, Any] = VIT, **more: Any) -> Architecture:
    return Architecture(name, "vision", f"{cls}Config", f"{cls}ForImageClassification", {**base, **more}, images(size))


def speech(name: str, cls: str, head: str, inputs: Callable[[], Batch], base: Mapping[str, Any],
           loss: Callable[[Any, Any], torch.Tensor] = default_loss, **more: Any) -> Architecture:
    return Architecture(name, "speech", f"{cls}Config", f"{cls}For{head}", {**base, **more}, inputs, loss)


def multimodal(name: str, cls: str, model: str, inputs: Callable[[], Batch], **settings: Any) -> Architecture:
    return Architecture(name, "multimodal", f"{cls}Config", model, settings, inputs)


GPT = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3, "use_cache": False, **SPECIAL}

ARCHITECTURES: tuple[Architecture, ...] = (
    decoder("llama", "Llama"),
    decoder("mistral", "Mistral", sliding_window=5),
    decoder("qwen2", "Qwen2"),
    decoder("qwen3", "Qwen3", head_dim=6),
    decoder("gemma", "Gemma", head_dim=8),
    decoder("gemma2", "Gemma2", head_dim=8, sliding_window=5),
    decoder("gemma3", "Gemma3Text", base={**DECODER, "head_dim": 8, "sliding_window": 5}, model="Gemma3ForCausalLM"),
    decoder("phi", "Phi", hidden_size=32, num_key_value_heads=4),
    decoder("phi3", "Phi3"),
    decoder("gpt2", "GPT2", base=GPT, model="GPT2LMHeadModel"),
    decoder("gpt_bigcode", "GPTBigCode", base=GPT),
    decoder("gpt_neo", "GPTNeo", base={**DECODER, "num_layers": 2, "num_heads": 3, "window_size": 5,
                                       "attention_types": [[["global", "local"], 1]]}),
    decoder("gpt_neox", "GPTNeoX", hidden_size=32, rotary_pct=0.5),
    decoder("gptj", "GPTJ", base=GPT, n_embd=24, rotary_dim=4, tie_word_embeddings=False),
    decoder("opt", "OPT", ffn_dim=37, word_embed_proj_dim=24),
    decoder("bloom", "Bloom", base={"vocab_size": VOCAB, "hidden_size": 24, "n_layer": 2, "n_head": 3,
                                    "use_cache": False, **SPECIAL}),
    decoder("falcon", "Falcon", alibi=False, multi_query=True, new_decoder_architecture=False),
    decoder("mpt", "Mpt", base={"vocab_size": VOCAB, "d_model": 24, "n_heads": 3, "n_layers": 2, "max_seq_len": 32,
                                "use_cache": False, **SPECIAL}),
    decoder("olmo", "Olmo"),
    decoder("olmo2", "Olmo2"),
    decoder("stablelm", "StableLm", hidden_size=32),
    decoder("starcoder2", "Starcoder2"),
    decoder("codegen", "CodeGen", base=GPT, n_embd=32, n_head=4, rotary_dim=4, tie_word_embeddings=False),
    decoder("persimmon", "Persimmon", hidden_size=32),
    decoder("cohere", "Cohere"),
    decoder("glm", "Glm", head_dim=8),
    decoder("granite", "Granite"),
    decoder("nemotron", "Nemotron", hidden_size=32),
    decoder("smollm3", "SmolLM3"),
    decoder("exaone4", "Exaone4", sliding_window=5),
    decoder("xglm", "XGLM", d_model=24, ffn_dim=37, num_layers=2, attention_heads=4),
    decoder("biogpt", "BioGpt"),
    decoder("mixtral", "Mixtral", base=EXPERTS, num_local_experts=5),
    decoder("qwen2_moe", "Qwen2Moe", base=EXPERTS, shared_expert_intermediate_size=23),
    decoder("qwen3_moe", "Qwen3Moe", base=EXPERTS, head_dim=6),
    decoder("olmoe", "Olmoe", base=EXPERTS),
    decoder("deepseek_v3", "DeepseekV3", base=EXPERTS, n_routed_experts=4, n_group=2, topk_group=1, q_lora_rank=9,
            kv_lora_rank=11, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8, first_k_dense_replace=1,
            num_key_value_heads=4),
    decoder("gpt_oss", "GptOss", base=EXPERTS, num_local_experts=4, head_dim=6, sliding_window=5),
    decoder("mamba", "Mamba", unmasked_causal, state_size=5, num_hidden_layers=2),
    decoder("mamba2", "Mamba2", unmasked_causal,
            base={"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 5, "num_heads": 6,
                  "head_dim": 8, "n_groups": 2, "chunk_size": 4, "use_cache": False, **SPECIAL}),
    encoder("bert", "Bert"),
    encoder("roberta", "Roberta"),
    encoder("xlm_roberta", "XLMRoberta"),
    encoder("camembert", "Camembert"),
    encoder("distilbert", "DistilBert", base={"vocab_size": VOCAB, "dim": 24, "n_layers": 2, "n_heads": 3,
                                              "hidden_dim": 41, "max_position_embeddings": 32, **SPECIAL}),
    encoder("albert", "Albert", embedding_size=13),
    encoder("electra", "Electra", embedding_size=13),
    encoder("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder("deberta_v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=6,
            norm_rel_ebd="layer_norm", share_att_key=True),
    encoder("mpnet", "MPNet", base={**ENCODER, "pad_token_id": 1, "bos_token_id": 0}),
    encoder("convbert", "ConvBert", num_attention_heads=4, embedding_size=13, head_ratio=2, conv_kernel_size=3),
    encoder("layoutlm", "LayoutLM", layout, max_2d_position_embeddings=64),
    encoder("funnel", "Funnel", base={"vocab_size": VOCAB, "block_sizes": [1, 1], "num_decoder_layers": 1,
                                      "d_model": 24, "n_head": 3, "d_head": 8, "d_inner": 41, **SPECIAL}),
    encoder("roformer", "RoFormer", embedding_size=24, num_attention_heads=4),
    encoder("megatron_bert", "MegatronBert"),
    encoder("mobilebert", "MobileBert", embedding_size=12, intra_bottleneck_size=12, num_feedforward_networks=2),
    encoder("fnet", "FNet", unmasked),
    encoder("squeezebert", "SqueezeBert", embedding_size=24, num_attention_heads=4, intermediate_size=40),
    encoder("rembert", "RemBert", input_embedding_size=13, output_embedding_size=17),
    encoder("modernbert", "ModernBert", local_attention=6, cls_token_id=1, sep_token_id=2),
    encoder("ernie", "Ernie"),
    translator("t5", "T5", base=T5),
    translator("mt5", "MT5", base=T5),
    translator("longt5", "LongT5", base=T5, local_radius=3),
    translator("switch_transformers", "SwitchTransformers", base=T5, num_experts=4, expert_capacity=16),
    translator("bart", "Bart"),
    translator("mbart", "MBart"),
    translator("pegasus", "Pegasus"),
    translator("marian", "Marian", model="MarianMTModel", decoder_vocab_size=VOCAB),
    translator("m2m_100", "M2M100"),
    translator("blenderbot", "Blenderbot"),
    translator("plbart", "PLBart"),
    translator("led", "LED", attention_window=4, max_encoder_position_embeddings=32,
               max_decoder_position_embeddings=32),
    vision("vit", "ViT"),
    vision("deit", "DeiT"),
    vision("beit", "Beit", use_relative_position_bias=True),
    vision("data2vec_vision", "Data2VecVision"),
    vision("dinov2", "Dinov2"),
    vision("swin", "Swin", 16, base=PYRAMID, image_size=16, patch_size=2, embed_dim=12, num_heads=[2, 3],
           window_size=4),
    vision("swinv2", "Swinv2", 16, base=PYRAMID, image_size=16, patch_size=2, embed_dim=12, num_heads=[2, 3],
           window_size=4),
    vision("convnext", "ConvNext", 17, base=PYRAMID, hidden_sizes=[10, 14], num_stages=2, patch_size=2),
    vision("convnextv2", "ConvNextV2", 17, base=PYRAMID, hidden_sizes=[10, 14], num_stages=2, patch_size=2),
    vision("resnet", "ResNet", 21, base=PYRAMID, embedding_size=6, hidden_sizes=[6, 10], layer_type="bottleneck"),
    vision("regnet", "RegNet", 21, base=PYRAMID, embedding_size=6, hidden_sizes=[8, 12], groups_width=4),
    vision("mobilenet_v1", "MobileNetV1", 33, base={"num_labels": CLASSES}, image_size=33, depth_multiplier=0.25),
    vision("mobilenet_v2", "MobileNetV2", 33, base={"num_labels": CLASSES}, image_size=33, depth_multiplier=0.25),
    vision("segformer", "Segformer", 32, base={"num_labels": CLASSES}, num_encoder_blocks=2, depths=[1, 1],
           sr_ratios=[2, 1], hidden_sizes=[10, 12], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 3],
           mlp_ratios=[2, 3], decoder_hidden_size=11),
    vision("poolformer", "PoolFormer", 32, base={"num_labels": CLASSES}, num_encoder_blocks=2, depths=[1, 2],
           hidden_sizes=[10, 14], patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], mlp_ratio=2.0),
    vision("pvt", "Pvt", 32, base={"num_labels": CLASSES}, image_size=32, num_encoder_blocks=2, depths=[1, 1],
           sequence_reduction_ratios=[2, 1], hidden_sizes=[10, 12], patch_sizes=[4, 2], strides=[4, 2],
           num_attention_heads=[1, 3], mlp_ratios=[2, 3]),
    vision("pvt_v2", "PvtV2", 32, base={"num_labels": CLASSES}, image_size=32, num_encoder_blocks=2, depths=[1, 1],
           sr_ratios=[2, 1], hidden_sizes=[10, 12], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 3],
           mlp_ratios=[2, 3]),
    vision("mobilevit", "MobileViT", 32, base={"num_labels": CLASSES}, image_size=32, hidden_sizes=[12, 14, 16],
           neck_hidden_sizes=[4, 6, 8, 10, 12, 14, 20], num_attention_heads=2),
    vision("levit", "Levit", 32, base={"num_labels": CLASSES}, image_size=32, hidden_sizes=[12, 16, 20],
           num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[4, 4, 4], attention_ratio=[2, 2, 2],
           down_ops=[["Subsample", 4, 3, 4, 2, 2], ["Subsample", 4, 4, 4, 2, 2]]),
    vision("focalnet", "FocalNet", 16, base=PYRAMID, image_size=16, patch_size=2, embed_dim=12, hidden_sizes=[12, 24],
           focal_levels=[2, 2], focal_windows=[3, 3]),
    vision("bit", "Bit", 33, base=PYRAMID, embedding_size=8, hidden_sizes=[8, 16], num_groups=2,
           layer_type="preactivation"),
    vision("efficientnet", "EfficientNet", 33, base={"num_labels": CLASSES}, image_size=33, width_coefficient=0.25,
           depth_coefficient=0.2, hidden_dim=320),
    speech("whisper", "Whisper", "ConditionalGeneration", spectrogram, SEQ2SEQ, num_mel_bins=10,
           max_source_positions=20, max_target_positions=16, apply_spec_augment=False, begin_suppress_tokens=None,
           suppress_tokens=None),
    speech("speech_to_text", "Speech2Text", "ConditionalGeneration", spectrogram_frames, SEQ2SEQ,
           input_feat_per_channel=10, input_channels=1, conv_channels=14, num_conv_layers=2,
           max_source_positions=40, max_target_positions=16),
    speech("wav2vec2", "Wav2Vec2", "SequenceClassification", wave(), WAVE),
    speech("wav2vec2_ctc", "Wav2Vec2", "CTC", unlabelled_wave, WAVE, ctc_loss),
    speech("hubert", "Hubert", "SequenceClassification", wave(), WAVE),
    speech("wavlm", "WavLM", "SequenceClassification", wave(), WAVE),
    speech("audio_spectrogram_transformer", "AST", "AudioClassification", spectrogram_class, VIT, max_length=24,
           num_mel_bins=16, frequency_stride=5, time_stride=5),
    multimodal("clip", "CLIP", "CLIPModel", contrastive(12), text_config=TEXT, vision_config=VISION,
               projection_dim=13),
    multimodal("siglip", "Siglip", "SiglipModel", contrastive(12), text_config=TEXT, vision_config=VISION),
    multimodal("chinese_clip", "ChineseCLIP", "ChineseCLIPModel", contrastive(12), text_config=ENCODER,
               vision_config=VISION, projection_dim=13),
    multimodal("blip", "Blip", "BlipForConditionalGeneration", caption(12),
               text_config={**TEXT, "encoder_hidden_size": 24}, vision_config=VISION),
    multimodal("vilt", "Vilt", "ViltForQuestionAnswering", question(12), **{**ENCODER, "image_size": 12,
                                                                            "patch_size": 4, "num_labels": CLASSES,
                                                                            "max_image_length": 12}),
    multimodal("git", "Git", "GitForCausalLM", caption(12), **{**ENCODER, "vision_config": VISION}),
    multimodal("llava", "Llava", "LlavaForConditionalGeneration", captioned(12, 9),
               text_config=("LlamaConfig", DECODER), vision_config=("CLIPVisionConfig", VISION), image_token_index=3,
               vision_feature_select_strategy="default", image_seq_length=9),
)

BY_NAME: Mapping[str, Architecture] = {a.name: a for a in ARCHITECTURES}
